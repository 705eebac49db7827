"""The dashboard is what Grafana's published schema says, by the models that Grafana makes of it.

A model drops keys that the schema has not, and takes values of any type: both are looked for.
Skipped without grafana-foundation-sdk, of which .ci/run installs a version that fits.
"""

from __future__ import annotations

import enum
import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_files import DASHBOARD

dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
# What Grafana itself writes into every dashboard, and its schema has not.
UNKNOWN = "definition"


def as_model(document: Any) -> Any:
    from grafana_foundation_sdk.cog import plugins

    plugins.register_default_plugins()
    return dashboard.Dashboard.from_json(json.loads(json.dumps(document)))


def lost(said: Any, kept: Any, at: str = "") -> Iterator[str]:
    """Where `kept` has not what `said` has."""
    if isinstance(said, dict) and isinstance(kept, dict):
        for key in said.keys() - {UNKNOWN}:
            if key in kept:
                yield from lost(said[key], kept[key], f"{at}.{key}")
            else:
                yield f"{at}.{key}"
    elif isinstance(said, list) and isinstance(kept, list) and len(said) == len(kept):
        for number, pair in enumerate(zip(said, kept, strict=True)):
            yield from lost(*pair, f"{at}[{number}]")
    elif said != kept:
        yield f"{at}: {said!r}"


def misfits(model: Any, at: str = "") -> Iterator[str]:
    """Values of a model that are not of its types."""
    names = vars(sys.modules[type(model).__module__])
    for name, hint in type(model).__annotations__.items():
        yield from _misfits(getattr(model, name), hint, f"{at}.{name}", names)


def _misfits(value: Any, hint: Any, at: str, names: dict[str, Any]) -> Iterator[str]:
    if isinstance(hint, str | typing.ForwardRef):
        hint = eval(getattr(hint, "__forward_arg__", hint), names)
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Union:
        every = [[*_misfits(value, one, at, names)] for one in inner]
        yield from min(every, key=len) if all(every) else []
    elif kind is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _misfits(item, inner[0], f"{at}[{number}]", names)
    elif kind is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _misfits(item, inner[1], f"{at}.{key}", names)
    elif not _fits(value, hint, inner):
        yield f"{at}: {value!r}"
    elif hasattr(value, "from_json"):
        yield from misfits(value, at)


def _fits(value: Any, hint: Any, inner: tuple[Any, ...]) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in inner
    if typing.get_origin(hint) is not None:  # a list or a dict, and the value is none
        return False
    if issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    if isinstance(value, bool):
        return hint in (bool, object)
    return isinstance(value, (int, float) if hint is float else hint)


def faults(document: Any) -> list[str]:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    model = as_model(document)
    kept = json.loads(JSONEncoder(sort_keys=True).encode(model))
    return [*lost(document, kept), *misfits(model)]


def test_the_dashboard_is_as_the_schema_says() -> None:
    assert faults(DASHBOARD) == []


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        (("fieldConfig", "defaults"), "unot", "short"),
        (("fieldConfig", "defaults"), "unit", 3),
        (("fieldConfig", "defaults", "thresholds"), "mode", "absolut"),
        (("options",), "colourMode", "background"),
        (("options", "reduceOptions"), "calcs", "lastNotNull"),
        (("gridPos",), "w", "6"),
        (("targets", 0), "exprs", "up"),
    ],
)
def test_what_the_schema_has_not_is_found(place: tuple[Any, ...], key: str, value: Any) -> None:
    document = json.loads(json.dumps(DASHBOARD))
    (wrong, *_) = [panel for panel in document["panels"] if panel["type"] == "stat"]
    for step in place:
        wrong = wrong[step]
    wrong[key] = value
    assert len(faults(document)) >= 1
