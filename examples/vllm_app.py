"""Ray Serve LLM: replicas of vLLM on one node that share a Raydix cache, with OpenAI's HTTP API.

    python examples/small_chat_model.py small-chat       # or any model that vLLM serves
    ray start --head
    raydix start --for vllm small-chat --capacity 65536
    python examples/vllm_app.py small-chat --cache kv-0 --replicas 2
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "small-chat", "messages": [{"role": "user", "content": "Hello"}], "stream": true}'

All of it runs in vLLM's environment (`make engines-venv`). The program joins the running cluster, and Ctrl-C ends the
replicas but not the cache. Each replica is an engine with a scheduler and a worker of its own. It loads the KV that any
other has computed. Without `--cache` the replicas share nothing.

With `--caches` in place of `--cache`, each replica uses a cache of its own node, one of those with matching names, and
`RaydixRequestRouter` sends each request to the replica with the cache that holds its prefix:

    raydix start --for vllm small-chat --capacity 65536 --set events=slim --name chat-0
    raydix start --for vllm small-chat --capacity 65536 --set events=slim --name chat-1
    python examples/vllm_app.py small-chat --caches 'chat-*' --replicas 2

Arguments of the engine that change the KV (`block_size`, `dtype`, `kv_cache_dtype`) must be those that the cache was
started for; otherwise the replicas do not start, and their log names the differing fields. examples/engines.md has the
settings of the connector, and says how the replicas' weights are replaced.
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import ray
import typer

from raydix.actors.cli.stats import stats as show_stats
from raydix.actors.deploy import find_caches
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.placement import beside, nearest_cache
from raydix.schemas import CacheUnavailable, InvalidRequest

try:
    from ray import serve
    from ray.serve.llm import LLMConfig, LLMServer, build_openai_app
except ImportError as error:
    raise ImportError("Ray Serve LLM needs vLLM's environment: make engines-venv") from error

APP = "raydix-vllm"
Count = Annotated[int, typer.Option(min=1)]


def transfer_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` of an engine with those settings of the connector."""
    return {
        "kv_connector": "RaydixConnector",
        "kv_connector_module_path": "raydix.actors.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # vLLM's default, "fail", would end a request with an error
        "kv_connector_extra_config": settings,
    }


def resource_of_node(cache: str) -> str:
    """Return the resource of Ray that only the node of the cache has."""
    place: Any = beside(cache)
    node_id = getattr(place, "node_id", None)
    if node_id is None:
        sys.exit(f"error: cache {cache!r} has a GPU of its own in a placement group, which leaves none to the replicas")
    (address,) = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id]
    return f"node:{address}"


class NearServer(LLMServer):
    """A replica on a cache of its node, which it names for the router."""

    async def __init__(self, llm_config: LLMConfig, **options: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """Choose the cache, and start the engine with it."""
        transfer = llm_config.engine_kwargs["kv_transfer_config"]
        settings = EngineSettings.of(transfer["kv_connector_extra_config"])
        place = serve.get_replica_context().rank.local_rank
        self._cache = await asyncio.to_thread(nearest_cache, settings.cache, place=place, namespace=settings.namespace)
        extra = transfer["kv_connector_extra_config"] | {"cache": self._cache}
        llm_config.update_engine_kwargs(kv_transfer_config=transfer | {"kv_connector_extra_config": extra})
        await super().__init__(llm_config, **options)

    async def record_replica_metadata(self) -> dict[str, str]:
        """Return what the router reads."""
        return {"raydix_cache": self._cache}


def router_config(model: Path, caches: str, engine: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the `request_router_config` that sends requests to the caches by their prefix."""
    kwargs = {
        "caches": caches,
        "tokens_of": "raydix.actors.vllm_tokens:ChatTokens",
        "tokens_of_kwargs": {"model": str(model), "engine_kwargs": engine},
    }
    return {
        "request_router_class": "raydix.actors.serve_router.RaydixRequestRouter",
        "request_router_kwargs": kwargs | more,
    }


def build_app(
    model: Path,
    *,
    settings: dict[str, Any] | None,
    is_pattern: bool = False,
    router: dict[str, Any] | None = None,
    replicas: int,
    gpus: float,
    cpus: float,
    engine: dict[str, Any],
) -> Any:
    """Return the application of `ray.serve.llm`. The process must have joined Ray.

    Args:
        model: folder of the model and its tokenizer; the folder's name is the model's in the API.
        settings: of the connector, with the name of a running cache; None: the replicas share nothing.
        is_pattern: `cache` in the settings is a pattern of names, and each replica uses a cache of its node.
        router: more arguments of `RaydixRequestRouter`; None: Serve's default router.
        gpus, cpus: of a rank of a replica. With 0 GPUs vLLM computes on the CPU.
        engine: more arguments of the engine.
    """
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    ranks = engine.get("tensor_parallel_size", 1)
    deployment: dict[str, Any] = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0}}  # those of the bundle
    if settings is not None and router is not None:
        deployment["request_router_config"] = router_config(model, settings["cache"], engine, router)
    if settings is not None:
        if is_pattern and not find_caches(settings["cache"]):
            raise CacheUnavailable(f"no cache with a name like {settings['cache']!r} runs")
        settings = {"ray_address": ray.get_runtime_context().gcs_address} | settings
        engine = engine | {"kv_transfer_config": transfer_config(settings)}
        if not is_pattern:
            bundle[resource_of_node(EngineSettings.of(settings).cache_of(0, ranks))] = 0.001
    handed_on = [name for name in os.environ if name.startswith(("VLLM_", "OMP_")) or name == "RAY_AUTH_MODE"]
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": model.name, "model_source": str(model)},
        "accelerator_config": {"kind": "gpu" if gpus else "cpu"},  # without it Ray would ask for GPUs
        "placement_group_config": {"bundles": [bundle] * ranks},
        "deployment_config": deployment,
        "runtime_env": {"env_vars": {name: os.environ[name] for name in handed_on}},
        "engine_kwargs": engine,
        "server_cls": NearServer if is_pattern else None,
    }
    ingress = {"num_replicas": 1, "autoscaling_config": None, "ray_actor_options": {"num_cpus": 0}}
    return build_openai_app({"llm_configs": [LLMConfig.model_validate(config)], "ingress_deployment_config": ingress})


def main(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="folder of a model with its tokenizer")],
    cache: Annotated[
        str | None, typer.Option(help="name of a running cache; without it replicas share nothing")
    ] = None,
    caches: Annotated[
        str | None, typer.Option(help="pattern of running caches' names, as 'chat-*', in place of --cache")
    ] = None,
    router: Annotated[
        str, typer.Option(metavar="JSON", help="more arguments of the router, with --caches; null: Serve's default")
    ] = "{}",
    replicas: Count = 2,
    gpus: Annotated[float, typer.Option(min=0, help="of each rank; 0: vLLM computes on the CPU")] = 0,
    cpus: Annotated[float, typer.Option(min=0, help="of each rank, as Ray counts them")] = 0.5,
    engine: Annotated[str, typer.Option(metavar="JSON", help='more arguments of vLLM, as {"dtype": "float32"}')] = "{}",
    settings: Annotated[str, typer.Option(metavar="JSON", help='of the connector, as {"weights": "v1"}')] = "{}",
    address: Annotated[str, typer.Option(envvar="RAY_ADDRESS", help="of the running Ray cluster")] = "auto",
    port: int = 8000,
):
    """Serve MODEL until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ray.init(address=address, namespace="serve", log_to_driver=False)
    except ConnectionError:
        sys.exit("error: no Ray cluster is reached: ray start --head")
    if not gpus:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of each replica's own prefix cache
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else replicas bind to the same cores
    arguments = json.loads(engine)
    if cache is not None and caches is not None:
        sys.exit("error: --cache and --caches exclude each other")
    if caches is not None and arguments.get("tensor_parallel_size", 1) > 1:
        sys.exit("error: --caches needs engines with one rank: the caches of several ranks have one name together")
    name = caches or cache
    try:
        app = build_app(
            model.resolve(),
            settings=None if name is None else {"cache": name} | json.loads(settings),
            is_pattern=caches is not None,
            router=None if caches is None else json.loads(router),
            replicas=replicas,
            gpus=gpus,
            cpus=cpus,
            engine=arguments,
        )
    except CacheUnavailable as error:
        sys.exit(f"error: {error}\nraydix start --for vllm {model} --capacity TOKENS")
    except InvalidRequest as error:
        sys.exit(f"error: {error}")
    serve.start(http_options={"port": port})
    try:
        serve.run(app, name=APP)
        print(f"{replicas} replicas of {model.resolve().name} serve http://127.0.0.1:{port}/v1", flush=True)
        if cache is not None:
            show_stats(EngineSettings(cache=cache).cache_of(0, arguments.get("tensor_parallel_size", 1)))
            sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            signal.pause()
    finally:
        serve.shutdown()


if __name__ == "__main__":
    typer.run(main)
