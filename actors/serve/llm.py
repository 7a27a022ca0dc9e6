"""Replicas of `ray.serve.llm` on Raydix caches: the parts of their `LLMConfig`. Runs in vLLM's environment.

    from ray.serve.llm import LLMConfig
    from raydix.actors.serve.llm import NearServer, router_config, transfer_config

    model = "/models/small-chat"
    config = LLMConfig(
        model_loading_config={"model_id": "small-chat", "model_source": model},
        engine_kwargs={"kv_transfer_config": transfer_config({"cache": "chat-*"})},
        server_cls=NearServer,
        deployment_config={"num_replicas": 2, "request_router_config": router_config("chat-*", model)},
    )

With one cache for all replicas, leave `server_cls` and the router out, name that cache in the settings, and add
`node_resource(name)` to the bundles of the replicas. `examples/vllm_app.py` does both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import ray

from raydix.actors.cluster.deploy import NAMESPACE
from raydix.actors.cluster.placement import beside, nearest_cache
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.vllm.cache import transfer_config
from raydix.actors.serve.router import request_router_config
from raydix.schemas import InvalidRequest
from raydix.schemas.version import how_to_install

try:
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.llm import LLMConfig, LLMServer
except ImportError as error:
    raise ImportError(f"ray.serve.llm needs vLLM's environment and an extra; {how_to_install('engines')}") from error

__all__ = ["NearServer", "node_resource", "router_config", "transfer_config"]

_TOKENS_OF = "raydix.actors.engines.vllm.tokens:ChatTokens"
_TRANSFER, _SETTINGS = "kv_transfer_config", "kv_connector_extra_config"
_CACHE_START_S = 600.0  # a node's cache may start after its replicas: it reads the model, and reserves its memory


class NearServer(LLMServer):
    """A replica on a cache of its node, which it names for the router.

    The setting `cache` of the connector is a pattern of names. The replicas of a node are spread over its caches. A
    replica waits up to 10 minutes for a cache, as Serve may start it before the cache of a new node.
    """

    async def __init__(self, llm_config: LLMConfig, **options: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """Choose the cache, and start the engine with it.

        Raises:
            CacheUnavailable: no such cache has started on this node in time.
            InvalidRequest: a setting of the connector is wrong.
        """
        transfer = llm_config.engine_kwargs[_TRANSFER]
        settings = EngineSettings.of(transfer[_SETTINGS])
        place = serve.get_replica_context().rank.local_rank
        self._cache = await asyncio.to_thread(
            nearest_cache, settings.cache, place=place, namespace=settings.namespace, wait_s=_CACHE_START_S
        )
        chosen = transfer | {_SETTINGS: transfer[_SETTINGS] | {"cache": self._cache}}
        llm_config.update_engine_kwargs(**{_TRANSFER: chosen})
        await super().__init__(llm_config, **options)

    async def record_replica_metadata(self) -> dict[str, str]:
        """Return the name of the cache. Serve passes it to the router."""
        return {"raydix_cache": self._cache}


def router_config(
    caches: str, model: str, engine_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> RequestRouterConfig:
    """Return the `request_router_config` that sends chats and completions to the cache with their prefix.

    Args:
        caches: a pattern of the caches' names.
        model: the folder of the model, as `model_source` of `LLMConfig`.
        engine_kwargs: as in `LLMConfig`: the router renders a chat as the engine does.
        options: more arguments of `request_router_config` in `raydix.actors.serve.router`.

    Raises:
        InvalidRequest: an argument is wrong; the message names it.
    """
    of_tokens = {"model": model, "engine_kwargs": dict(engine_kwargs or {})}
    try:
        return request_router_config(caches, _TOKENS_OF, tokens_of_kwargs=of_tokens, **options)
    except TypeError as error:  # an option with an unknown name
        raise InvalidRequest(str(error)) from error


def node_resource(cache: str, *, namespace: str = NAMESPACE) -> str:
    """Return the resource of Ray that only the node of a cache has, for the bundles of replicas. Blocks.

    Raises:
        CacheUnavailable: no cache of that name runs, or it does not answer.
        InvalidRequest: the cache has a GPU of its own, which leaves none to replicas.
    """
    place = beside(cache, namespace=namespace)
    node_id = getattr(place, "node_id", None)
    if node_id is None:
        raise InvalidRequest(
            f"cache {cache!r} has a GPU of its own in a placement group, which leaves none to replicas: use it with "
            "vllm serve, or start one with pool.device=cpu"
        )
    nodes = cast(Any, ray.nodes)()
    (address,) = [node["NodeManagerAddress"] for node in nodes if node["NodeID"] == node_id]
    return f"node:{address}"
