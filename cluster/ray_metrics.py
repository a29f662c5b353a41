"""The same metrics through Ray, for its dashboard and for the Prometheus that scrapes a Ray cluster: `ray_quire_*`.

Each process hands over what it counts itself: an engine its own numbers, a gateway those of its requests. Nothing is
counted twice, and nothing is done per token: once per interval the totals are compared with those of the last time.

Ray knows counters and gauges as Prometheus does. Its histograms take single observations only, so a histogram travels
as its series (`…_bucket`, `…_sum`, `…_count`), each a gauge that only grows: `rate` and `histogram_quantile` read them
as they read the originals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from ray.util import metrics as ray_metrics

logger = logging.getLogger(__name__)

PERIOD_S = 5.0


class RayExporter:
    """Hands `families()` to Ray."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families
        self._instruments: dict[str, ray_metrics.Counter | ray_metrics.Gauge] = {}
        self._shown: dict[tuple[str, tuple[str, ...]], tuple[ray_metrics.Gauge, dict[str, str]]] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}  # counters, as Ray knows them

    async def run(self) -> None:
        """Export until cancelled. What goes wrong here is logged: numbers must not end a service."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self.export()
            except Exception:
                logger.exception("Metrics could not be handed to Ray")

    def export(self) -> None:
        """Tell Ray what has changed. A gauge that has no value any more is 0: Ray would show the last one for ever."""
        gone, self._shown = self._shown, {}
        for family in self._families():
            for sample in family.samples:
                if family.type == "counter":
                    self._count(family, sample)
                    continue
                gauge, tags = self._gauge(family, sample), dict(sample.labels)
                gauge.set(sample.value, tags=tags)
                self._shown[sample.name, tuple(tags.values())] = (gauge, tags)
        for series in gone.keys() - self._shown.keys():
            gauge, tags = gone[series]
            gauge.set(0.0, tags=tags)

    def _count(self, family: Metric, sample: Sample) -> None:
        series = (sample.name, tuple(sample.labels.values()))
        more = sample.value - self._told.get(series, 0.0)
        if more <= 0:
            return
        self._told[series] = sample.value
        name = ray_name(sample.name).removesuffix("_total")  # Ray puts it there again
        counter = self._instruments.get(name)
        if counter is None:
            counter = ray_metrics.Counter(name, family.documentation, tuple(sample.labels))
            self._instruments[name] = counter
        assert isinstance(counter, ray_metrics.Counter)
        counter.inc(more, tags=dict(sample.labels))

    def _gauge(self, family: Metric, sample: Sample) -> ray_metrics.Gauge:
        name = ray_name(sample.name)
        gauge = self._instruments.get(name)
        if gauge is None:
            gauge = self._instruments[name] = ray_metrics.Gauge(name, family.documentation, tuple(sample.labels))
        assert isinstance(gauge, ray_metrics.Gauge)
        return gauge


def ray_name(name: str) -> str:
    """A series' name as it is given to Ray, which writes `ray_` before it and takes no colons."""
    return name.replace(":", "_")
