"""`Metric`, and `Part`, which makes the metrics of a part of `CacheStats`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from raydix.schemas import CacheStats, Histogram

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]
Kind = Literal["gauge", "counter"]

EXPORTED_PREFIX = "ray_"  # Ray prefixes every name with it
_NOUNS = ("tokens", "pages", "prefixes")
_UNITS = {"_ms": 1000, "_s": 1}  # end of a field -> divisor for seconds


class Metric(NamedTuple):
    """One metric: a gauge has the current value, a counter rises from the start of the cache.

    Attributes:
        read: returns the value for each combination of labels.
        labels: all labels but `cache`.
        field: of the part of `CacheStats`; empty: `read` computes the value.
        noun: the name of one fault, if it counts faults.
    """

    name: str
    kind: Kind
    meaning: str
    read: Callable[[CacheStats], Iterator[Sample]]
    labels: tuple[str, ...] = ()
    field: str = ""
    noun: str = ""

    @property
    def exported_name(self) -> str:
        """The name in Prometheus."""
        return EXPORTED_PREFIX + self.name


class Part(NamedTuple):
    """A part of `CacheStats`, which makes the metrics of its fields.

    Attributes:
        place: the field that has the part; empty: all of `CacheStats`.
        prefix: the prefix of the names of its metrics.
        subject: the beginning of their meanings.
        model: the class of the part. Its descriptions are the meanings.
    """

    place: str
    prefix: str
    subject: str
    model: type[BaseModel]

    def gauge(self, field: str, name: str = "") -> Metric:
        """Return the metric of a field that rises and falls."""
        return self._of_field("gauge", field, name)

    def counter(self, field: str, name: str = "", label: str = "", noun: str = "") -> Metric:
        """Return the metric of a count, or of a dictionary of counts by the label."""
        return self._of_field("counter", field, name, label)._replace(noun=noun)

    def gauges(self, *fields: str) -> tuple[Metric, ...]:
        """Return the metrics of fields that rise and fall."""
        return tuple(map(self.gauge, fields))

    def counters(self, *fields: str) -> tuple[Metric, ...]:
        """Return the metrics of counts."""
        return tuple(map(self.counter, fields))

    def _of_field(self, kind: Kind, field: str, name: str, label: str = "") -> Metric:
        divisor = next((divisor for end, divisor in _UNITS.items() if field.endswith(end)), 1)

        def read(part: Any) -> Any:
            value = getattr(part, field)
            return by_label(label, value.items()) if label else value / divisor

        meaning = f"{self.subject}{self.model.model_fields[field].description}"
        labels = [label] if label else []
        return self.computed(kind, name or _name_of(field), meaning, read, *labels)._replace(field=field)

    def computed(self, kind: Kind, name: str, meaning: str, read: Callable[[Any], Any], *labels: str) -> Metric:
        """Return a metric of the part's value, or samples, that a function returns. A cache without the part has none.

        Args:
            read: takes the part. None: there is no value now.
        """

        def samples(stats: CacheStats) -> Iterator[Sample]:
            part = getattr(stats, self.place) if self.place else stats
            found = None if part is None else read(part)
            if labels:
                yield from found or ()
            elif found is not None:
                yield (), float(found)

        end = "_total" if kind == "counter" else ""
        return Metric(f"raydix_{self.prefix}{name}{end}", kind, meaning, samples, labels)

    def spread(self, field: str, name: str) -> tuple[Metric, ...]:
        """Return the three series of a Prometheus histogram, as gauges: its buckets, its sum and its count.

        Ray's histograms take one value at a time and export sums of bucket middles. Gauges can be set to existing
        counts. Unlike Ray's counters, they also export empty buckets.
        """
        meaning = self.model.model_fields[field].description

        def series(part: str, of: str, read: Callable[[Histogram], Any], *labels: str) -> Metric:
            return self.computed(
                "gauge", f"{name}_{part}", f"{meaning}: {of}", lambda stats: read(getattr(stats, field)), *labels
            )

        return (
            series("bucket", "how many were at most `le`", _buckets, "le"),
            series("sum", "their sum", lambda histogram: histogram.sum),
            series("count", "how many there were", lambda histogram: histogram.count),
        )


def _name_of(field: str) -> str:
    """Return the name of a field's metric: its noun comes last, and the unit is seconds."""
    noun, _, rest = field.partition("_")
    if noun in _NOUNS:
        return f"{rest}_{noun}"
    return next((field.removesuffix(end) + "_seconds" for end in _UNITS if field.endswith(end)), field)


def by_label(label: str, values: Iterable[tuple[str, float]]) -> Iterator[Sample]:
    """Yield values by a label."""
    for name, value in values:
        yield ((label, name),), float(value)


def _buckets(histogram: Histogram) -> Iterator[Sample]:
    bounds = (*(f"{bound:g}" for bound in histogram.bounds), "+Inf")
    return by_label("le", zip(bounds, accumulate(histogram.counts), strict=True))
