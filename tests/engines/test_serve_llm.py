"""`raydix.actors.serve.llm`, and how `examples/vllm_app.py` finds the port of Serve; without engines."""

from __future__ import annotations

import importlib.util
import pickle
import socket
import urllib.request
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import yaml
from support.documents import ROOT
from support.processes.ray_head import free_port

from raydix.schemas import InvalidRequest


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_app", ROOT / "examples/vllm_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_serve(ray_address: str) -> Iterator[None]:
    """A cluster without Serve, before and after the test."""
    from ray import serve

    serve.shutdown()
    yield
    serve.shutdown()


def config(**options: Any) -> Any:
    from ray.serve.llm import LLMConfig

    from raydix.actors.serve.llm import NearServer, router_config, transfer_config

    engine = {"dtype": "float32"}
    return LLMConfig(
        model_loading_config={"model_id": "small-chat", "model_source": "small-chat"},
        accelerator_config={"kind": "cpu"},
        engine_kwargs=engine | {"kv_transfer_config": transfer_config({"cache": "chat-*"})},
        server_cls=NearServer,
        deployment_config={
            "num_replicas": 2,
            "request_router_config": router_config("chat-*", "small-chat", engine, **options),
        },
    )


def test_serve_takes_the_parts_and_sends_them_to_replicas() -> None:
    made = pickle.loads(pickle.dumps(config(tokens_of_timeout_s=2.0)))

    router = made.deployment_config["request_router_config"]
    assert router.request_router_kwargs["tokens_of_kwargs"] == {
        "model": "small-chat",
        "engine_kwargs": {"dtype": "float32"},
    }
    assert router.request_router_kwargs["tokens_of_timeout_s"] == 2.0
    assert made.server_cls.__name__ == "NearServer"
    assert made.engine_kwargs["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"


def test_serve_takes_the_replicas_of_the_manifest_for_kubernetes() -> None:
    from ray.serve.llm import LLMConfig

    documents = yaml.safe_load_all((ROOT / "examples/kuberay/rayservice.yaml").read_text())
    (service,) = [document for document in documents if document["kind"] == "RayService"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]

    (made,) = [LLMConfig.model_validate(config) for config in application["args"]["llm_configs"]]

    assert made.server_cls.__name__ == "NearServer"
    assert made.model_loading_config.model_source == "/models/chat"


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"surprise": 1}, "unexpected keyword argument 'surprise'"), ({"route": {"weight": "high"}}, "route: weight")],
)
def test_a_wrong_option_of_the_router_is_refused_before_anything_starts(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        config(**options)


def test_the_url_is_that_of_the_serve_that_runs(
    example: ModuleType, no_serve: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray import serve

    @serve.deployment
    class Hello:
        def __call__(self, request: Any) -> str:
            return str(request.url.path)

    assert example.running_serve() is None
    port = free_port()
    started = example.start_serve(port)
    serve.run(Hello.bind())  # type: ignore[attr-defined]

    assert example.start_serve(None) == example.start_serve(port) == example.running_serve()
    for where in (started, example.running_serve()):
        assert urllib.request.urlopen(where.url("/"), timeout=60).read() == b"/v1"
    assert started.url("/chat/") == f"http://127.0.0.1:{port}/chat/v1"
    with pytest.raises(
        SystemExit, match=rf"--port must be {port}, where Serve listens .* not {port + 1}\n--port {port}"
    ):
        example.start_serve(port + 1)


def test_a_port_of_another_program_is_refused(example: ModuleType, no_serve: None) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(SystemExit, match=rf"--port {port} cannot be used: Address already in use"):
            example.start_serve(port)

    assert example.running_serve() is None


@pytest.mark.parametrize(
    ("text", "fault"), [("{dtype: 1}", "must be JSON, not"), ("[1]", "must be a JSON object, not")]
)
def test_an_option_that_is_no_json_object_is_named(example: ModuleType, text: str, fault: str) -> None:
    with pytest.raises(SystemExit, match=f"error: --engine {fault}"):
        example.read_object("--engine", text)
