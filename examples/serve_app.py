"""Ray Serve: replicas of a model that share one prefix cache per node.

    pip install 'raydix[serve,transformers]'
    serve run --app-dir examples --working-dir examples serve_app:app    # sends this folder to the replicas
    curl localhost:8000 -d '{"token_ids": [1, 2, 3], "max_new_tokens": 8}'

The first replica on a node starts the node's cache, detached; the others find it by name. The cached KV stays when
Serve replaces replicas. `raydix list` shows the caches; after `serve shutdown`, `raydix stop --all` ends them. Replicas
share a node's only GPU with `Model.options(ray_actor_options={"num_gpus": 0.9})`.
"""

from __future__ import annotations

from typing import Any, cast

import pydantic
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydix.actors import start_cache
from raydix.actors.demo import MODEL
from raydix.actors.transformers_worker import TransformersWorker, cache_config_for
from raydix.schemas import CacheConfig, InvalidRequest, PoolExhausted

try:
    from ray import serve
    from starlette.responses import JSONResponse
except ImportError as error:
    raise ImportError("Ray Serve needs the extra: pip install 'raydix[serve]'") from error


def node_cache(config: CacheConfig, name: str = "kv") -> Any:
    """Return the cache of this node; the first caller starts it."""
    node_id = ray.get_runtime_context().get_node_id()
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return start_cache(config, name=f"{name}-{node_id[:12]}", lifetime="detached", scheduling_strategy=place)


class Asked(pydantic.BaseModel):
    """The JSON body of an HTTP request."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    token_ids: list[int]
    max_new_tokens: int = 16
    lora_id: str | None = None


@serve.deployment(num_replicas=2, max_ongoing_requests=64)
class Model:
    """A replica: a model worker on the cache of its node."""

    def __init__(self, model: Any, config: CacheConfig) -> None:
        self._worker = TransformersWorker(
            node_cache(config), model=model, owner=serve.get_replica_context().replica_tag
        )

    async def check_health(self) -> None:
        """Open the session and check that the model fits the pool. Serve calls this before the first request."""
        await self._worker.open()

    async def generate(self, token_ids: list[int], max_new_tokens: int = 16, lora_id: str | None = None) -> Any:
        """Continue a prompt. Other deployments call `await handle.generate.remote(token_ids)`."""
        done = await self._worker.generate(token_ids, max_new_tokens, lora_id=lora_id)
        return {"token_ids": list(done.token_ids), "prefix_len": done.prefix_len}

    async def __call__(self, request: Any) -> Any:
        """Serve an HTTP request: 400 if it can never be served, 503 if it gets no slots in time."""
        try:
            asked = Asked.model_validate_json(await request.body())
            return await self.generate(asked.token_ids, asked.max_new_tokens, asked.lora_id)
        except (pydantic.ValidationError, InvalidRequest) as error:
            return JSONResponse({"error": str(error)}, 400)
        except PoolExhausted as error:
            return JSONResponse({"error": str(error)}, 503 if error.can_ever_fit else 400)


app = cast(Any, Model).bind(MODEL, cache_config_for(MODEL, num_slots=65_536, page_size=16))
