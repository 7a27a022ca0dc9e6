"""The recorded interface of vLLM's connectors is that of the installed vLLM."""

from __future__ import annotations

from support.engines.base_signatures import read_from_vllm, recorded


def test_the_recorded_interface_is_the_installed_one() -> None:
    assert read_from_vllm() == recorded()


def test_the_connector_can_be_made_by_vllm() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from raydix.actors.vllm_connector import RaydixConnector

    assert issubclass(RaydixConnector, KVConnectorBase_V1)
    assert not RaydixConnector.__abstractmethods__
