"""The dashboard and the alert rules of docs/deploy/grafana, and what they ask for."""

from __future__ import annotations

import json
import re

import doc_pages
import yaml

FOLDER = doc_pages.ROOT / "docs/deploy/grafana"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = DASHBOARD["templating"]["list"]


def expressions() -> list[tuple[str, str]]:
    """(title, expression) of panels and rules, Grafana's variables put in."""
    found = [(rule["alert"], rule["expr"]) for rule in RULES]
    for panel in PANELS:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m")
            found.append((panel["title"], re.sub(r'"\$(\w+)"', '".*"', text)))
    return found
