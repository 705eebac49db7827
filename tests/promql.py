"""A reader of PromQL, as far as dashboards and alert rules use it: what an expression selects.

It knows no values. What it holds: the grammar, the types of arguments (instant vector, range
vector, scalar), the names of functions and aggregations, which labels an expression may still name
after an aggregation took the others, and that operands without `on` have the same ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<duration>\d+(?:ms|[smhdwy])(?:\d+(?:ms|[smhdwy]))*)
  | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
  | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
  | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){}\[\],])
)""",
    re.VERBOSE,
)
AGGREGATIONS = {"sum", "avg", "max", "min", "count"}
RANGE_FUNCTIONS = {"rate", "increase", "changes", "avg_over_time", "sum_over_time", "max_over_time"}
OPERATORS = [
    {"or"},
    {"and", "unless"},
    {"==", "!=", "<", ">", "<=", ">="},
    {"+", "-"},
    {"*", "/", "%"},
]
ANY_LABEL = None


class PromqlError(ValueError):
    """What Prometheus would refuse."""


@dataclasses.dataclass
class Value:
    """kind: "vector", "range" or "scalar"; labels: those left, ANY_LABEL where all may be."""

    kind: str
    labels: frozenset[str] | None = ANY_LABEL


class Expression:
    """Reads it whole. Attributes: `metrics`, the names that it selects; `labels`, of its result.

    Raises:
        PromqlError: it is none, or names a metric or a label that there is not.
    """

    def __init__(self, text: str, known: Mapping[str, frozenset[str]]) -> None:
        """`known`: labels by metric name."""
        self.metrics: set[str] = set()
        self._known = known
        self._tokens = self._split(text)
        value = self._operation(0)
        self._want("end")
        if value.kind == "range":
            raise PromqlError("a range vector is no answer")
        self.labels = value.labels

    def _split(self, text: str) -> list[tuple[str, str]]:
        tokens, at = [], 0
        text = text.rstrip()
        while at < len(text):
            found = TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise PromqlError(f"unreadable at {text[at:]!r}")
            tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        return [*tokens, ("end", "")]

    @property
    def _next(self) -> str:
        return self._tokens[0][1]

    def _want(self, *kinds: str) -> str:
        kind, text = self._tokens.pop(0)
        if kind not in kinds and text not in kinds:
            raise PromqlError(f"wanted {' or '.join(kinds)}, got {text or kind!r}")
        return text

    def _takes(self, text: str) -> bool:
        if self._next != text or self._tokens[0][0] in ("string", "end"):
            return False
        self._tokens.pop(0)
        return True

    def _names(self) -> frozenset[str]:
        """(a, b)"""
        self._want("(")
        names = set()
        while not self._takes(")"):
            names.add(self._want("name"))
            if self._next != ")":
                self._want(",")
        return frozenset(names)

    def _check_labels(self, names: frozenset[str], labels: frozenset[str] | None) -> None:
        if labels is not ANY_LABEL and names - labels:
            raise PromqlError(f"no label {sorted(names - labels)}, only {sorted(labels)}")

    def _operation(self, level: int) -> Value:
        if level == len(OPERATORS):
            return self._unary()
        left = self._operation(level + 1)
        while self._next in OPERATORS[level]:
            self._tokens.pop(0)
            matching, side, taken = self._matching()
            right = self._operation(level + 1)
            if matching is None and level > 1 and "scalar" not in (left.kind, right.kind):
                self._check_same(left, right)
            left = self._combined(left, right, matching, side, taken)
        return left

    def _check_same(self, left: Value, right: Value) -> None:
        """Series of other labels match nothing, without a word of Prometheus."""
        if ANY_LABEL not in (left.labels, right.labels) and left.labels != right.labels:
            raise PromqlError(f"{sorted(left.labels)} never match {sorted(right.labels)}")

    def _matching(self) -> tuple[frozenset[str] | None, str, frozenset[str]]:
        """(labels of `on`, "group_left" or "group_right" or "", labels taken over)."""
        if not self._takes("on"):
            return None, "", frozenset()
        on = self._names()
        for side in ("group_left", "group_right"):
            if self._takes(side):
                return on, side, self._names() if self._next == "(" else frozenset()
        return on, "", frozenset()

    def _combined(
        self,
        left: Value,
        right: Value,
        on: frozenset[str] | None,
        side: str,
        taken: frozenset[str],
    ) -> Value:
        if "range" in (left.kind, right.kind):
            raise PromqlError("an operator takes no range vector")
        if left.kind == "scalar" or right.kind == "scalar":
            if on is not None:
                raise PromqlError("a scalar is matched with nothing")
            return left if right.kind == "scalar" else right
        if on is None:
            return left
        self._check_labels(on, left.labels)
        self._check_labels(on, right.labels)
        many, one = (right, left) if side == "group_right" else (left, right)
        self._check_labels(taken, one.labels)
        if not side:
            return Value("vector", on)
        return Value("vector", None if many.labels is None else many.labels | taken)

    def _unary(self) -> Value:
        if self._takes("-"):
            return self._unary()
        if self._takes("("):
            value = self._operation(0)
            self._want(")")
            return value
        kind, text = self._tokens[0]
        if kind == "number":
            self._tokens.pop(0)
            return Value("scalar")
        name = self._want("name")
        if name in AGGREGATIONS:
            return self._aggregation()
        if self._next == "(":
            return self._call(name)
        return self._selector(name)

    def _aggregation(self) -> Value:
        by: frozenset[str] = frozenset()
        if self._takes("by"):
            by = self._names()
        self._want("(")
        value = self._operation(0)
        self._want(")")
        if value.kind != "vector":
            raise PromqlError(f"an aggregation takes an instant vector, not a {value.kind}")
        self._check_labels(by, value.labels)
        return Value("vector", by)

    def _quantile(self) -> Value:
        """histogram_quantile(number, vector with `le`)"""
        self._want("(")
        self._want("number")
        self._want(",")
        value = self._operation(0)
        self._want(")")
        if value.kind != "vector" or value.labels is ANY_LABEL or "le" not in value.labels:
            raise PromqlError("histogram_quantile takes the buckets of a histogram, with le")
        return Value("vector", value.labels - {"le"})

    def _call(self, name: str) -> Value:
        if name == "histogram_quantile":
            return self._quantile()
        self._want("(")
        value = self._operation(0)
        self._want(")")
        wanted = {"vector": "scalar"}.get(name, "range" if name in RANGE_FUNCTIONS else None)
        if wanted is None:
            raise PromqlError(f"no function {name!r}")
        if value.kind != wanted:
            raise PromqlError(f"{name} takes a {wanted}, not a {value.kind}")
        return Value("vector", frozenset() if name == "vector" else value.labels)

    def _selector(self, name: str) -> Value:
        if name not in self._known:
            raise PromqlError(f"no metric {name!r}")
        self.metrics.add(name)
        labels = self._known[name]
        if self._takes("{"):
            while not self._takes("}"):
                self._check_labels(frozenset({self._want("name")}), labels)
                operator = self._want("=", "!=", "=~", "!~")
                text = self._want("string")
                if operator in ("=~", "!~"):
                    re.compile(text[1:-1])
                if self._next != "}":
                    self._want(",")
        if self._takes("["):
            self._want("duration")
            self._want("]")
            return Value("range", labels)
        return Value("vector", labels)
