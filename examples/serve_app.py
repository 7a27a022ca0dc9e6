"""Ray Serve: replicas of a model that share one prefix cache per node.

    pip install '.[serve,transformers]'    # in the clone
    serve run --app-dir examples --working-dir examples serve_app:app    # sends this folder to the replicas
    curl localhost:8000 -d '{"token_ids": [1, 2, 3], "max_new_tokens": 8}'

The first replica on a node starts the node's cache, detached; the others find it by name. The cached KV stays when
Serve replaces replicas. `raydix list` shows the caches; after `serve shutdown`, `raydix stop --all` ends them. Replicas
share a node's only GPU with `Model.options(ray_actor_options={"num_gpus": 0.9})`.

With several caches, a router sends each request to the replica with the cache that holds its prefix:

    serve run --app-dir examples --working-dir examples serve_app:routed replicas=4 caches_per_node=2

Serve's proxy chooses a replica before it reads the body of a request. So a deployment without a model, `Front`, reads
the body, and calls the model by a handle.
"""

from __future__ import annotations

from typing import Any, cast

import pydantic
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydix.actors import start_cache
from raydix.actors.demo.run import MODEL
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for
from raydix.schemas import CacheConfig, InvalidRequest, PoolExhausted

try:
    from ray import serve
    from starlette.responses import JSONResponse
except ImportError as error:
    raise ImportError("Ray Serve needs an extra; in the clone: pip install '.[serve]'") from error

from raydix.actors.serve.router import request_router_config


def node_cache(config: CacheConfig, name: str = "kv") -> Any:
    """Return the cache of this node; the first caller starts it."""
    node_id = ray.get_runtime_context().get_node_id()
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return start_cache(config, name=f"{name}-{node_id[:12]}", lifetime="detached", scheduling_strategy=place)


async def answer(request: Any, generate: Any) -> Any:
    """Answer an HTTP request: 400 if it can never be served, 503 if it gets no slots in time."""
    try:
        asked = Asked.model_validate_json(await request.body())
        return await generate(asked.token_ids, asked.max_new_tokens, asked.lora_id)
    except (pydantic.ValidationError, InvalidRequest) as error:
        return JSONResponse({"error": str(error)}, 400)
    except PoolExhausted as error:
        return JSONResponse({"error": str(error)}, 503 if error.can_ever_fit else 400)


class Asked(pydantic.BaseModel):
    """The JSON body of an HTTP request."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    token_ids: list[int]
    max_new_tokens: int = 16
    lora_id: str | None = None


@serve.deployment(num_replicas=2, max_ongoing_requests=64)
class Model:
    """A replica: a model worker on the cache of its node."""

    def __init__(self, model: Any, config: CacheConfig, caches_per_node: int = 1) -> None:
        context = serve.get_replica_context()
        name = f"kv{context.rank.local_rank % caches_per_node}" if caches_per_node > 1 else "kv"
        cache = node_cache(config, name)
        self._cache = f"{name}-{ray.get_runtime_context().get_node_id()[:12]}"
        self._worker = TransformersWorker(cache, model=model, owner=context.replica_tag)

    def record_replica_metadata(self) -> dict[str, str]:
        """Name the cache of this replica, for the router."""
        return {"raydix_cache": self._cache}

    async def check_health(self) -> None:
        """Open the session and check that the model fits the pool. Serve calls this before the first request."""
        await self._worker.open()

    async def generate(self, token_ids: list[int], max_new_tokens: int = 16, lora_id: str | None = None) -> Any:
        """Continue a prompt. Other deployments call `await handle.generate.remote(token_ids)`."""
        done = await self._worker.generate(token_ids, max_new_tokens, lora_id=lora_id)
        return {"token_ids": list(done.token_ids), "prefix_len": done.prefix_len}

    async def __call__(self, request: Any) -> Any:
        """Serve an HTTP request."""
        return await answer(request, self.generate)


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Front:
    """Reads HTTP requests, and sends them to the replicas of the model by their tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def generate(self, token_ids: list[int], max_new_tokens: int, lora_id: str | None) -> Any:
        """Continue a prompt, on the replica that the router chooses."""
        return await self._model.generate.remote(token_ids, max_new_tokens, lora_id=lora_id)

    async def __call__(self, request: Any) -> Any:
        """Serve an HTTP request."""
        return await answer(request, self.generate)


class Layout(pydantic.BaseModel):
    """The arguments of `routed`."""

    replicas: int = 2
    caches_per_node: int = 2
    tokens_of_timeout_s: float = 0.05  # a request without tokens by then goes to the least loaded replica


def routed(layout: Layout) -> Any:
    """Return the application with several caches, and a router of requests to their replicas."""
    router = request_router_config(
        caches="kv[0-9]*",
        tokens_of="raydix.actors.serve.tokens:token_ids",
        tokens_of_timeout_s=layout.tokens_of_timeout_s,
    )
    config = cache_config_for(MODEL, num_slots=65_536, page_size=16, events="slim", events_stride_tokens=16)
    model = cast(Any, Model).options(num_replicas=layout.replicas, request_router_config=router)
    return cast(Any, Front).bind(model.bind(MODEL, config, layout.caches_per_node))


app = cast(Any, Model).bind(MODEL, cache_config_for(MODEL, num_slots=65_536, page_size=16))
