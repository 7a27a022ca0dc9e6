"""Ray Serve LLM: replicas of vLLM on one node that share a Raydix cache, with OpenAI's HTTP API.

    python examples/small_chat_model.py small-chat       # or any model that vLLM serves
    RAY_worker_niceness=0 ray start --head
    raydix start --for vllm small-chat --capacity 65536
    python examples/vllm_app.py small-chat --cache kv-0 --replicas 2
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "small-chat", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}'

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

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ray
import typer

from raydix.actors.cli.stats import stats as show_stats
from raydix.actors.cluster.deploy import find_caches
from raydix.actors.engines.settings import EngineSettings
from raydix.schemas import CacheUnavailable, InvalidRequest
from raydix.schemas.shown import brief

try:
    from ray import serve
    from ray.serve.exceptions import RayServeException
    from ray.serve.llm import LLMConfig, build_openai_app

    from raydix.actors.serve.llm import NearServer, node_resource, router_config, transfer_config
except ImportError as error:
    raise ImportError("Ray Serve LLM needs vLLM's environment; add in the clone: pip install '.[engines]'") from error

APP = "raydix-vllm"
DEFAULT_PORT = 8000
Count = Annotated[int, typer.Option(min=1)]


class Running(NamedTuple):
    """Where Serve listens."""

    host: str
    port: int
    path: str = ""

    def url(self, route: str) -> str:
        """Return the URL of OpenAI's API below a route, for this node."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}{self.path}{route.rstrip('/')}/v1"


def running_serve() -> Running | None:
    """Return where Serve listens in this cluster; None: it does not run."""
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return None
    options: Any = ray.get(controller.get_http_config.remote())
    return Running(options.host or "", options.port, options.root_path)


def start_serve(port: int | None) -> Running:
    """Start Serve on a port, by default 8000. If it runs already, its port stays."""
    found = running_serve()
    if found is not None:
        if port not in (None, found.port):
            sys.exit(
                f"error: --port must be {found.port}, where Serve listens in this cluster already, not {port}\n"
                f"--port {found.port}, or end Serve with all its applications first: serve shutdown"
            )
        return found
    port = DEFAULT_PORT if port is None else port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just given up is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            sys.exit(f"error: --port {port} cannot be used: {error.strerror}\nend the program there, or another --port")
    serve.start(http_options={"port": port})
    return Running("127.0.0.1", port)


def read_object(option: str, text: str) -> Any:
    """Return the JSON object, or null, that an option has."""
    try:
        value = json.loads(text)
    except ValueError as error:
        sys.exit(f"error: {option} must be JSON, not {brief(text)}: {error}")
    if not isinstance(value, dict | None):
        sys.exit(f"error: {option} must be a JSON object, not {brief(text)}")
    return value


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
    if settings is not None:
        settings = {"ray_address": ray.get_runtime_context().gcs_address} | settings
        checked = EngineSettings.of(settings)
        if not is_pattern:
            bundle[node_resource(checked.cache_of(0, ranks), namespace=checked.namespace)] = 0.001
        elif not find_caches(checked.cache, checked.namespace):
            raise CacheUnavailable(f"no cache with a name like {checked.cache!r} runs")
        if router is not None:
            deployment["request_router_config"] = router_config(
                checked.cache, str(model), engine, namespace=checked.namespace, **router
            )
        engine = engine | {"kv_transfer_config": transfer_config(settings)}
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
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help=f"of Serve; default: its own if it runs, else {DEFAULT_PORT}")
    ] = None,
    route: Annotated[str, typer.Option(help="of this application among those of Serve")] = "/",
):
    """Serve MODEL until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # With the details, `usage` of an answer has the number of cached tokens.
    arguments = {"enable_prompt_tokens_details": True} | (read_object("--engine", engine) or {})
    more, routing = read_object("--settings", settings) or {}, read_object("--router", router)
    try:
        ray.init(address=address, namespace="serve", log_to_driver=False)
    except ConnectionError:
        sys.exit("error: no Ray cluster is reached: ray start --head")
    if not gpus:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of each replica's own prefix cache
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else replicas bind to the same cores
    if not route.startswith("/"):
        sys.exit(f"error: --route must begin with /, not {route!r}\n--route /{route}")
    if cache is not None and caches is not None:
        sys.exit("error: --cache and --caches exclude each other")
    if caches is not None and arguments.get("tensor_parallel_size", 1) > 1:
        sys.exit("error: --caches needs engines with one rank: the caches of several ranks have one name together")
    name = caches or cache
    try:
        app = build_app(
            model.resolve(),
            settings=None if name is None else {"cache": name} | more,
            is_pattern=caches is not None,
            router=None if caches is None else routing,
            replicas=replicas,
            gpus=gpus,
            cpus=cpus,
            engine=arguments,
        )
    except CacheUnavailable as error:
        sys.exit(f"error: {error}\nraydix start --for vllm {model} --capacity TOKENS")
    except InvalidRequest as error:
        sys.exit(f"error: {error}")
    ran_before = running_serve() is not None
    running = start_serve(port)
    try:
        try:
            serve.run(app, name=APP, route_prefix=route)
        except RayServeException as error:  # such as a route of another application
            reason = getattr(error, "cause", error)
            sys.exit(f"error: {reason}\nanother --route, or end that application: serve.delete(NAME)")
        print(f"{replicas} replicas of {model.resolve().name} serve {running.url(route)}", flush=True)
        if cache is not None:
            used = EngineSettings.of({"cache": cache} | more)
            ranks = arguments.get("tensor_parallel_size", 1)
            show_stats(used.cache_of(0, ranks), namespace=used.namespace)
            sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            signal.pause()
    finally:
        if ran_before:  # other applications may run there
            serve.delete(APP)
        else:
            serve.shutdown()


if __name__ == "__main__":
    typer.run(main)
