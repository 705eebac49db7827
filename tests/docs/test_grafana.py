"""The dashboard and the alert rules name metrics and labels that the daemon exports."""

from __future__ import annotations

import re

import pytest
from grafana_files import DASHBOARD, PANELS, RULES, VARIABLES, expressions
from prometheus_client import ProcessCollector

from ep_runtime_server.metrics.catalogue import HISTOGRAM, METRICS

# Prometheus adds the scraped target; `job` stays ours with honor_labels, and is its own elsewhere.
SCRAPED = {"instance", "job"}
KNOWN = {"up": SCRAPED}
KNOWN |= {family.name: SCRAPED for family in ProcessCollector(registry=None).collect()}
for metric in METRICS.values():
    parts = ("_sum", "_count", "_bucket") if metric.kind == HISTOGRAM else ("",)
    for part in parts:
        more = {"le"} if part == "_bucket" else set()
        KNOWN[metric.full_name + part] = {*metric.labels, *SCRAPED, *more}
SELECTED = re.compile(r"\b((?:ep_runtime|process)_\w+|up)\b(?:{([^}]*)})?")


def labels_of(text: str) -> set[str]:
    """Labels of all metrics that an expression selects."""
    return set().union(*(KNOWN[metric] for metric, _ in SELECTED.findall(text)))


@pytest.mark.parametrize(("title", "text"), expressions())
def test_an_expression_asks_for_what_is_exported(title: str, text: str) -> None:
    found = SELECTED.findall(text)
    assert found
    for metric, selector in found:
        assert set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector)) <= KNOWN[metric]
    for names in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", text):
        assert set(re.findall(r"\w+", names)) <= labels_of(text)


def test_metrics_that_nothing_shows_are_few() -> None:
    shown = {metric for _, text in expressions() for metric, _ in SELECTED.findall(text)}
    parts = ("", "_sum", "_count", "_bucket")
    missing = [
        m.name for m in METRICS.values() if shown.isdisjoint(m.full_name + part for part in parts)
    ]
    # Facts about sizes, and metrics whose value another one has too.
    assert len(missing) <= len(METRICS) // 2, missing


def test_legends_messages_and_variables_name_labels_that_are_there() -> None:
    for rule in RULES:
        said = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= labels_of(rule["expr"]), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    for target in [target for panel in PANELS for target in panel["targets"]]:
        legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert set(legend) <= labels_of(target["expr"]), target["expr"]
    for variable in VARIABLES[1:]:
        query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert query is not None
        assert query[2] in labels_of(query[1])


def test_names_are_given_once() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 15
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
