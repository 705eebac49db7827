"""Encodes a sheet with prometheus-client; only this module needs the pip extra `metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from ep_runtime_server.metrics.catalogue import (
    BOUNDS_S,
    COUNTER,
    HISTOGRAM,
    METRICS,
    Histogram,
    Sheet,
)

_FAMILIES = {COUNTER: CounterMetricFamily, HISTOGRAM: HistogramMetricFamily}
_BOUNDS = [*map(str, BOUNDS_S), "+Inf"]


class _Families:
    """A sheet in the form of a registry, for prometheus-client's encoders."""

    def __init__(self, sheet: Sheet, *, detail: bool) -> None:
        self._sheet = sheet
        self._detail = detail

    def collect(self) -> Iterator[Any]:
        """Yields all metrics, even without series, so that scrapers see all names at once."""
        for metric in METRICS.values():
            if metric.detail and not self._detail:
                continue
            kind: Any = _FAMILIES.get(metric.kind, GaugeMetricFamily)
            family = kind(metric.full_name, metric.help, labels=metric.labels)
            for labels, value in self._sheet.rows.get(metric.name, ()):
                if isinstance(value, Histogram):
                    buckets = [*zip(_BOUNDS, value.counts, strict=True)]
                    family.add_metric(labels, buckets, value.sum_s)
                else:
                    family.add_metric(labels, value)
            yield family
        yield from ProcessCollector(registry=None).collect()


def encode(sheet: Sheet, accept: str, *, detail: bool) -> tuple[bytes, str]:
    """Returns (body, content type) in the format of a scraper's Accept header."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Families(sheet, detail=detail)), content_type
