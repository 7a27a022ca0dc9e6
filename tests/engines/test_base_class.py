"""The recorded interface of vLLM's connectors is that of the installed vLLM."""

from __future__ import annotations

import re
from typing import Any

from support.engines.base_signatures import read_from_vllm, recorded

from raydix.actors.engines.transfer_counts import COUNTS, SECONDS, TransferCounts, markdown


def test_the_recorded_interface_is_the_installed_one() -> None:
    assert read_from_vllm() == recorded()


def test_the_connector_can_be_made_by_vllm() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from raydix.actors.engines.vllm.connector import RaydixConnector

    assert issubclass(RaydixConnector, KVConnectorBase_V1)
    assert not RaydixConnector.__abstractmethods__


def test_the_connector_exports_the_metrics_of_the_table() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.config import VllmConfig

    from raydix.actors.engines.vllm.connector import RaydixConnector

    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = RaydixConnector.build_prom_metrics(VllmConfig(), types, ["model_name", "engine"], {0: ["a-model", "0"]})

    def exported_counts() -> set[float]:
        families = [family for family in REGISTRY.collect() if family.name.startswith("vllm:raydix_")]
        samples = [sample for family in families if family.type == "counter" for sample in family.samples]
        return {sample.value for sample in samples if sample.name.endswith("_total")}

    assert exported_counts() == {0.0}
    counts = TransferCounts()
    for name in COUNTS:
        counts.add(name, 3)
    for name in SECONDS:
        counts.observe(name, 0.004)
    metrics.observe(counts.take())

    exported = [family for family in REGISTRY.collect() if family.name.startswith("vllm:raydix_")]
    rows = re.findall(r"^\| `(vllm:\w+)` \| `\w+` \| (\w+) \| (.*) \|$", markdown(), flags=re.MULTILINE)
    assert [(family.name, family.type, family.documentation) for family in exported] == [
        (name.removesuffix("_total"), kind, meaning) for name, kind, meaning in rows
    ]
    values = {sample.name: sample.value for family in exported for sample in family.samples}
    assert {values[name] for name, kind, _ in rows if kind == "counter"} == {3.0}
    assert {values[f"{name}_sum"] for name, kind, _ in rows if kind == "histogram"} == {0.004}
