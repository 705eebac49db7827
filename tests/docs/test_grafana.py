"""The dashboard and the alert rules ask for what the daemon's endpoint exports."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql
import pytest
import yaml
from grafana_files import DASHBOARD, FOLDER, PANELS, RULES, VARIABLES, expressions
from prometheus_client import ProcessCollector

from ep_runtime_server.metrics.catalogue import HISTOGRAM, METRICS

# Prometheus adds who was scraped; `job` stays ours with honor_labels, and is its own elsewhere.
SCRAPED = {"instance", "job"}
KNOWN = {metric.full_name: frozenset({*metric.labels, *SCRAPED}) for metric in METRICS.values()}
for metric in [metric for metric in METRICS.values() if metric.kind == HISTOGRAM]:
    of_histogram = KNOWN.pop(metric.full_name)
    KNOWN |= {f"{metric.full_name}_{part}": of_histogram for part in ("sum", "count")}
    KNOWN[f"{metric.full_name}_bucket"] = of_histogram | {"le"}
KNOWN |= {family.name: frozenset(SCRAPED) for family in ProcessCollector(registry=None).collect()}
KNOWN["up"] = frozenset(SCRAPED)


@pytest.mark.parametrize(("title", "text"), expressions())
def test_an_expression_asks_for_what_is_exported(title: str, text: str) -> None:
    assert promql.Expression(text, KNOWN).metrics or text.startswith("vector")


def test_metrics_that_nothing_shows_are_few() -> None:
    shown = set().union(*(promql.Expression(text, KNOWN).metrics for _, text in expressions()))
    missing = [m.name for m in METRICS.values() if m.full_name not in shown]
    # Facts about sizes, and what another metric says as well.
    assert len(missing) <= len(METRICS) // 2, missing


def test_legends_and_messages_name_labels_that_are_left() -> None:
    texts = [
        (target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for panel in PANELS
        for target in panel["targets"]
    ]
    for rule in RULES:
        said = " ".join(rule["annotations"].values())
        texts.append((rule["expr"], re.findall(r"\$labels\.(\w+)", said)))
    for text, labels in texts:
        text = re.sub(r'"\$(\w+)"', '".*"', text.replace("$__rate_interval", "5m"))
        left = promql.Expression(text, KNOWN).labels
        assert left is promql.ANY_LABEL or set(labels) <= left, text


def test_rules_have_what_an_operator_needs() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 15
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        for text in rule["annotations"].values():
            inside = re.findall(r"{{(.*?)}}", text)
            assert all(
                re.fullmatch(r" \$(labels\.\w+|value( \| humanize\w*)?) ", x) for x in inside
            )


def test_panels_lie_side_by_side() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_ask_the_chosen_source_and_known_variables() -> None:
    names = {variable["name"] for variable in VARIABLES}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"]
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert isinstance(panel["options"], dict)
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids) > 0
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= names
    for variable in VARIABLES[1:]:
        query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert query is not None
        assert variable["query"]["query"] == variable["definition"]
        selector = re.sub(r'"\$(\w+)"', '".*"', query[1])
        (metric,) = promql.Expression(selector, KNOWN).metrics
        assert query[2] in KNOWN[metric]


@pytest.mark.parametrize(
    "text",
    [
        "ep_runtime_nothing",
        'ep_runtime_healthy{nod="a"}',
        "rate(ep_runtime_healthy)",
        "sum(ep_runtime_calls_total[5m])",
        "sum by (layer) (ep_runtime_healthy)",
        "max by (job) (ep_runtime_healthy) * on (node) ep_runtime_healthy",
        "sum by (node) (ep_runtime_healthy) / ep_runtime_healthy",
        "ep_runtime_healthy)",
        "ep_runtime_healthy ==",
        "sum(ep_runtime_healthy",
        "rat(ep_runtime_calls_total[5m])",
        "rate(ep_runtime_calls_total[5])",
        "ep_runtime_healthy{node='a' job='b'}",
        "histogram_quantile(0.5, sum by (op) (rate(ep_runtime_op_seconds_bucket[5m])))",
        "rate(ep_runtime_op_seconds[5m])",
    ],
)
def test_what_prometheus_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(promql.PromqlError):
        promql.Expression(text, KNOWN)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_promtool_takes_every_expression(tmp_path: Path) -> None:
    queries: list[dict[str, Any]] = [
        {"record": f"e:{number}", "expr": text} for number, (_, text) in enumerate(expressions())
    ]
    every = tmp_path / "expressions.yml"
    every.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": queries}]}))
    for path in (FOLDER / "alerts.yml", every):
        done = subprocess.run(
            ["promtool", "check", "rules", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
