"""Values as prometheus_client's metric families, each under its full name and with the labels that all share."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jaxvllm.server.histogram import Histogram


@dataclass(frozen=True)
class MetricFamilies:
    """Makes the families of one engine: `prefix:name`, with `labels` on every sample."""

    prefix: str
    labels: Mapping[str, str]

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=[*self.labels])
        family.add_metric([*self.labels.values()], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Its samples are called `name_total`."""
        return self.counters(name, text, (), {(): value})

    def counters(
        self, name: str, text: str, more_labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        """One family of counters: `values` by what each has for `more_labels`."""
        family = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=[*self.labels, *more_labels])
        for more, value in values.items():
            family.add_metric([*self.labels.values(), *more], value)
        return family

    def histogram(self, histogram: Histogram, limit: float = float("inf")) -> Metric:
        """Without its buckets above `limit`."""
        family = HistogramMetricFamily(
            f"{self.prefix}:{histogram.name}", histogram.documentation, labels=[*self.labels]
        )
        family.add_metric([*self.labels.values()], histogram.buckets(limit), histogram.sum)
        return family
