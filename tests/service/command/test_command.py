"""The `raydix` command on a real cluster: each command does its work, as text and as JSON, and fails with advice."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import ray
from rich.console import Console
from support.processes.command_line import run, run_json

from raydix.actors import PrefixCacheClient, connect, shutdown_cache, start_cache, start_cache_async
from raydix.actors.cli import doctor
from raydix.actors.cli.app import COMMANDS
from raydix.actors.cli.failures import failure_of
from raydix.actors.cli.start import _report
from raydix.actors.service import findings
from raydix.cache_core.kernels import CORE
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    InvalidRequest,
    LeaseConfig,
    ModelFingerprint,
    PoolConfig,
    protocol,
)
from raydix.schemas.version import package_version

pytestmark = pytest.mark.ray

PROMPT = list(range(1, 21))


@pytest.fixture
def namespace(ray_cluster: None) -> Iterator[str]:
    """Return a namespace for this module; no cache is left in it."""
    name = f"command-{uuid4().hex[:8]}"
    yield name
    run("stop", "--all", "--namespace", name)


@pytest.fixture(scope="module")
async def busy(ray_cluster: None) -> AsyncIterator[list[str]]:
    """Return the options that name an unchanging cache: of 64 slots, 16 hold the prompt, and 8 are a lease's."""
    namespace = f"command-{uuid4().hex[:8]}"
    leases = LeaseConfig(session_ttl_s=600)  # no test runs the loop of the client's heartbeats
    config = CacheConfig(page_size=8, pool=PoolConfig(num_slots=64, device="cpu"), leases=leases)
    cache = await start_cache_async(config, name="kv-0", namespace=namespace)
    async with PrefixCacheClient(cache, owner="a worker") as client:
        async with await client.acquire(PROMPT) as lease:
            await lease.insert(PROMPT)
        held = await client.acquire([7] * 8)
        yield ["kv-0", "--namespace", namespace]
        await held.release()
    await asyncio.to_thread(shutdown_cache, cache)


# ---------------------------------------------------------------- every command


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_a_help_text_and_takes_json(command: str) -> None:
    text = run(command, "--help").stdout

    assert "Usage: " in text
    assert "--json" in text


def test_help_lists_every_command_with_a_line_about_it() -> None:
    text = run("--help").stdout

    assert [command for command in COMMANDS if f"│ {command} " not in text] == []


def test_the_version_is_that_of_the_package_and_says_whether_the_core_is_compiled() -> None:
    assert run("--version").stdout == f"raydix {package_version()} (core: {CORE})\n"


# ---------------------------------------------------------------- start and stop


def test_start_makes_a_detached_cache_of_the_settings_and_stop_ends_it(namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("name: chat\npage_size: 8\npool: {num_slots: 64}\n")
    where = ["--namespace", namespace]

    (started,) = run_json("start", "-c", file, "--set", "pool.num_slots=128", *where)
    (again,) = run_json("start", "-c", file, "--set", "pool.num_slots=128", *where)

    (from_stdin,) = run_json("start", "-c", "-", "--set", "pool.num_slots=128", *where, stdin=file.read_text())

    assert (started["name"], started["num_slots"], started["device"]) == ("chat-0", 128, "cpu")
    assert (from_stdin["name"], from_stdin["reused"]) == ("chat-0", True)
    assert (started["reused"], again["reused"]) == (False, True)
    assert again["epoch"] == started["epoch"]
    mismatch = run_json("start", "-c", file, *where, exit_code=1)["error"]
    assert mismatch["type"] == "ConfigMismatch"
    assert "raydix stop NAME" in mismatch["advice"]
    assert run_json("stop", "chat-0", *where) == [{"name": "chat-0", "answered": True, "leases_cut_short": 0}]
    assert run_json("list", *where) == []


@pytest.mark.more
def test_a_description_starts_a_cache_of_the_same_configuration(namespace: str, tmp_path: Path) -> None:
    file, where = tmp_path / "cache.yaml", ["--namespace", namespace]
    pool = ("num_slots=128", "layers=[{num_kv_heads: 1, head_dim: 2}]", "dtype=float32", "device=cpu")
    options = ("page_size=8", "ghost={}", "eviction.low_watermark=0.25", "fingerprint=1e5")
    options += tuple(f"pool.{field}" for field in pool)
    settings = [part for each in options for part in ("--set", each)]
    (started,) = run_json(
        "start", "--name", "chat", *settings, "--host-capacity", "4x", "--disk", f"{tmp_path}:8x", *where
    )

    file.write_text(run("describe", "chat-0", *where).stdout)
    (same,) = run_json("start", "-c", file, *where)
    (other,) = run_json("start", "-c", file, "--name", "other", *where)

    assert (same["name"], same["reused"], other["name"], other["reused"]) == ("chat-0", True, "other-0", False)
    first, second = (run_json("describe", name, *where) for name in ("chat-0", "other-0"))
    assert first["digest"] == second["digest"] == CacheConfig.model_validate(first["config"]).digest()
    assert first["config"]["leases"]["max_waiters"] == 1024
    assert "max_waiters" not in file.read_text()
    assert re.search(r"\n# host tier: 512 slots, [^\n]+, evicted by 2q\n", file.read_text())
    assert "\n# disk tier: 1,024 slots, " in file.read_text()
    assert f", written at the second use, in {first['disk']['path']}\n" in file.read_text()
    assert first["host"] == started["host"] == second["host"]
    assert first["disk"] == started["disk"]
    wanted = {"num_slots": 1024, "num_swa_slots": 0, "num_state_slots": 0, "admit": "second_use"}
    assert {name: first["disk"][name] for name in wanted} == wanted
    assert (first["host"]["num_slots"], first["config"]["host"]["num_slots"]) == (512, 512)
    mismatch = run("start", "-c", file, "--set", "page_size=16", *where, exit_code=1).stderr
    assert "page_size is 8, not 16" in mismatch


@pytest.mark.long
def test_a_description_names_the_base_model_that_is_bound(namespace: str) -> None:
    where = ["--namespace", namespace]
    run("start", "--set", "pool.num_slots=64", *where)
    assert "\n# base model: none bound\n" in run("describe", "kv-0", *where).stdout
    assert run_json("describe", "kv-0", *where)["model_fingerprint"] == ""
    fingerprint = ModelFingerprint(fields={"model_type": "llama"}, weights="0")

    with PrefixCacheClient(connect("kv-0", namespace=namespace)).sync as cache:
        cache.bind_model(fingerprint)

    assert f"\n# base model: {fingerprint}\n" in run("describe", "kv-0", *where).stdout
    assert run_json("describe", "kv-0", *where)["model_fingerprint"] == str(fingerprint)


@pytest.mark.long
def test_the_eviction_task_of_a_fresh_cache_is_said_to_start_with_the_first_session(namespace: str) -> None:
    run("start", "--set", "pool.num_slots=64", "--namespace", namespace)

    task = run_json("stats", "kv-0", "--namespace", namespace)["eviction_task"]

    assert (task["enabled"], task["started"], task["alive"]) == (True, False, False)
    assert "task starts with the first session, 0 rounds" in run("stats", "kv-0", "--namespace", namespace).stdout


@pytest.mark.more
def test_a_cache_that_was_asked_for_nothing_has_no_hit_rate(namespace: str, tmp_path: Path) -> None:
    run("start", "--set", "pool.num_slots=64", "--namespace", namespace)
    page = tmp_path / "page.html"

    assert " - of tokens, 0 of 0 requests" in run("stats", "kv-0", "--namespace", namespace).stdout
    (row,) = [line.split() for line in run("list", "--namespace", namespace).stdout.splitlines() if "kv-0" in line]
    assert row[4:8] == ["0.0", "%", "0", "-"]  # in use, leases, hit rate
    assert "hit rate - of 0 prompt tokens" in run("report", "kv-0", "--namespace", namespace, "-o", page).stdout
    assert "<dt>hit rate</dt><dd>-</dd>" in page.read_text(encoding="utf-8")


@pytest.mark.more
def test_start_prints_how_to_connect_and_it_works(namespace: str) -> None:
    text = run("start", "--count", 2, "--set", "pool.num_slots=64", "--namespace", namespace).stdout

    assert f'PrefixCacheClient(connect("kv-0", namespace="{namespace}"))' in text
    assert "raydix stop kv-0 kv-1" in text
    assert connect("kv-1", namespace=namespace) is not None
    assert [row["name"] for row in run_json("list", "--namespace", namespace)] == ["kv-0", "kv-1"]
    stopped = run("stop", "--all", "--namespace", namespace).stdout
    assert stopped == "kv-0: stopped\nkv-1: stopped\n"


def test_the_niceness_of_rays_processes_is_named_at_the_start_and_by_doctor_alone(namespace: str) -> None:
    """The tests' own cluster starts its processes without it."""
    where, warning = ["--namespace", namespace], "Ray adds 15 to the niceness of its processes: "
    start = ["start", "--set", "pool.num_slots=64", *where]
    assert warning not in run(*start).stdout + run("doctor", *where).stdout

    def add_niceness(actor: Any) -> None:
        actor._host.service.niceness = 15

    ray.get(connect("kv-0", namespace=namespace).__ray_call__.remote(add_niceness))

    assert f"warning: kv-0: {warning}" in run(*start).stdout
    assert warning in run("doctor", *where).stdout
    assert warning not in run("list", *where).stdout + run("stats", "kv-0", *where).stdout
    assert run_json("stats", "kv-0", *where)["niceness"] == 15


def test_a_finding_of_several_caches_is_printed_once_at_their_start() -> None:
    facts = {"device": "cpu", "node_id": "n", "num_slots": 64, "num_bytes": 64, "reused": False, "host": None}
    facts |= {"disk": None}
    started = [
        {"name": "kv-0", "findings": ["little memory"], **facts},
        {"name": "kv-1", "findings": ["little memory", "a restart"], **facts},
    ]
    screen = Console(record=True, width=200, file=io.StringIO())

    screen.print(_report(started, "raydix"))

    warnings = [line for line in screen.export_text().splitlines() if line.startswith("warning: ")]
    assert warnings == ["warning: kv-0, kv-1: little memory", "warning: kv-1: a restart"]


@pytest.mark.parametrize(("device", "options"), [("cpu", "(scheduling"), ("cuda", "(num_gpus=0.9, scheduling")])
def test_start_prints_that_a_worker_beside_a_gpu_pool_takes_its_share(device: str, options: str) -> None:
    facts = {
        "name": "kv-0",
        "device": device,
        "node_id": "n",
        "num_slots": 64,
        "num_bytes": 64,
        "reused": False,
        "host": None,
        "disk": None,
    }
    facts["findings"] = ["too little memory"]
    console = Console(record=True, width=200, file=io.StringIO())

    console.print(_report([facts], "raydix"))

    text = console.export_text()
    assert f"Worker.options{options}_strategy=beside(" in text
    assert "warning: kv-0: too little memory" in text


@pytest.mark.more
async def test_stop_drains_for_the_given_time_and_prints_the_leases_cut_short(namespace: str) -> None:
    where = ["--namespace", namespace]
    await asyncio.to_thread(run, "start", "--set", "pool.num_slots=64", *where)
    client = PrefixCacheClient(connect("kv-0", namespace=namespace))
    lease = await client.acquire([1, 2, 3])

    stopped = await asyncio.to_thread(run, "stop", "kv-0", "--drain", 0.1, *where)

    assert stopped.stdout == "kv-0: stopped, which cut short 1 open lease\n"
    await lease.release()
    await client.close()


@pytest.mark.long
async def test_all_that_are_stopped_drain_at_once(namespace: str) -> None:
    where = ["--namespace", namespace]
    await asyncio.to_thread(run, "start", "--count", 2, "--set", "pool.num_slots=64", *where)
    first, second = (PrefixCacheClient(connect(name, namespace=namespace)) for name in ("kv-0", "kv-1"))
    held = await first.acquire([1, 2, 3])
    await (await second.acquire([1, 2, 3])).release()
    stopping = asyncio.create_task(asyncio.to_thread(run, "stop", "--all", "--drain", 500, *where))

    async def until_refused() -> None:
        while True:
            await (await second.acquire([1, 2, 3])).release()
            await asyncio.sleep(0.05)

    with pytest.raises(CacheUnavailable):
        await asyncio.wait_for(until_refused(), 300)
    assert not stopping.done()
    await held.release()
    assert (await stopping).stdout == "kv-0: stopped\nkv-1: stopped\n"
    await first.close()
    await second.close()


def test_stop_wants_names_or_all(namespace: str) -> None:
    assert "give --all" in run("stop", "--namespace", namespace, exit_code=2).stderr
    assert "give --all" in run("stop", "kv-0", "--all", "--namespace", namespace, exit_code=2).stderr


# ---------------------------------------------------------------- looking


def test_list_prints_the_kind_and_use_of_each_cache(busy: list[str]) -> None:
    (row,) = run_json("list", *busy[1:])

    assert (row["name"], row["state"], row["kind"], row["page_size"]) == ("kv-0", "ready", "radix", 8)
    assert (row["num_slots"], row["free_slots"], row["open_leases"], row["hit_rate"]) == (64, 40, 1, 0.0)
    assert b"PrefixCacheActor" in Path(f"/proc/{row['pid']}/cmdline").read_bytes()
    text = run("list", *busy[1:]).stdout
    assert "kv-0" in text
    assert "37.5 %" in text


def test_stats_are_those_of_the_cache(busy: list[str]) -> None:
    stats = run_json("stats", *busy)

    assert (stats["num_slots"], stats["free_slots"], stats["private_slots"], stats["tree_slots"]) == (64, 40, 8, 16)
    assert stats["used_fraction"] == pytest.approx(24 / 64)
    assert (stats["high_watermark"], stats["low_watermark"]) == (0.9, 0.8)
    assert stats["loop_lag_ms"] >= 0
    text = run("stats", *busy).stdout
    assert "37.5 % of 64 slots in use; eviction above 90 %, down to 80 %" in text
    assert "40 free, 8 private, 16 cached (0 locked), 0 quarantined" in text
    assert [(each["owner"], each["leases"], each["slots"]) for each in stats["owners"]] == [("a worker", 1, 8)]
    assert re.search(r"leases +1 open, the oldest \S+ (s|min) old; 0 requests wait for slots", text)
    assert re.search(r"a worker: 1 lease, 8 slots, up to \S+ (s|min) old", text)


def test_doctor_prints_the_findings_of_this_node_and_of_each_cache(busy: list[str]) -> None:
    node, cache = run_json("doctor", *busy[1:])

    assert (node["kind"], node["name"]) == ("node", "this node")
    assert (cache["kind"], cache["name"], cache["node_id"]) == ("cache", "kv-0", node["node_id"])
    stats = run_json("stats", *busy)
    assert cache["findings"] == [finding for finding in stats["findings"] if finding not in node["findings"]]
    text = run("doctor", *busy[1:]).stdout
    assert f"this node  {node['node_id'][:8]}  " in text and f"kv-0       {node['node_id'][:8]}  " in text
    assert [finding for row in (node, cache) for finding in row["findings"] if f"  {finding}" not in text] == []


def test_doctor_looks_at_the_named_caches_and_is_strict_if_it_is_asked(busy: list[str]) -> None:
    name, *where = busy
    cache = connect(name, namespace=where[1])

    def add_finding(actor: Any, *findings: str) -> None:
        actor._host.service.findings = findings

    assert [row["name"] for row in run_json("doctor", name, *where)] == ["this node", name]
    assert "no cache named 'kv-9' runs" in run("doctor", name, "kv-9", *where, exit_code=3).stderr
    found = any(row["findings"] for row in run_json("doctor", *where))
    run("doctor", name, "--strict", *where, exit_code=int(found))
    ray.get(cache.__ray_call__.remote(add_finding, "it is planted"))
    try:
        assert "it is planted" in run("doctor", name, *where).stdout
        assert "it is planted" in run("doctor", name, "--strict", *where, exit_code=1).stdout
    finally:
        ray.get(cache.__ray_call__.remote(add_finding))


def test_doctor_compares_versions_before_it_asks_for_counts(busy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "handshake", lambda: ("raydix", protocol.PROTOCOL, "9.9"))
    _, cache = run_json("doctor", *busy[1:])
    assert cache["findings"][-1].startswith(f"the cache runs raydix {package_version()}, and this command 9.9: ")

    monkeypatch.setattr(protocol, "PROTOCOL", protocol.PROTOCOL + 1)
    _, cache = run_json("doctor", *busy[1:])
    (finding,) = cache["findings"]
    assert finding.startswith(f"the cache speaks protocol {protocol.PROTOCOL - 1} (raydix {package_version()})")


@pytest.mark.more
def test_doctor_names_a_cache_that_does_not_answer(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = start_cache(CacheConfig(pool=PoolConfig(num_slots=64)), name="kv", namespace=namespace)
    pid = int(ray.get(cache.pool_handle.remote()).liveness_path.split("/")[2])
    monkeypatch.setattr(doctor, "_ANSWER_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        _, row = run_json("doctor", "--namespace", namespace)
    finally:
        os.kill(pid, signal.SIGCONT)

    (finding,) = row["findings"]
    assert finding.startswith("it has not answered for 0.2 s: ") and "raydix stop NAME" in finding
    shutdown_cache(cache)


def test_watched_stats_go_on_a_document_a_line(busy: list[str]) -> None:
    watch = ("stats", *busy, "--watch", "--rounds", 3, "--interval", 0.1)

    documents = [json.loads(line) for line in run(*watch, "--json").stdout.splitlines()]

    assert [each["free_slots"] for each in documents] == [40, 40, 40]
    assert "37.5 % of 64 slots in use" in run(*watch).stdout


def test_watched_stats_in_a_pipe_are_a_table_a_round_until_the_pipe_closes(busy: list[str]) -> None:
    arguments = ("stats", *busy, "--watch", "--interval", "0.1", "--address", ray.get_runtime_context().gcs_address)
    rounds = ("--rounds", "600")  # a command that prints nothing until its end does not hang
    command = [sys.executable, "-m", "raydix.actors.cli", *arguments, *rounds]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        heads = 0
        while heads < 3 and (line := watching.stdout.readline()):
            heads += line.startswith("kv-0  radix, ")
        is_running = watching.poll() is None
        watching.stdout.close()

        assert watching.stderr.read() == ""
    assert (heads, is_running, watching.returncode) == (3, True, 1)


@pytest.mark.more
@pytest.mark.parametrize(
    "arguments", [["dashboard"], ["list", "--json", "--address", "127.0.0.1:1"], ["demo", "--help"]], ids=str
)
def test_a_closed_pipe_ends_a_command_quietly(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "raydix.actors.cli", *arguments]
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)

    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_explain_reads_a_list_an_array_or_stdin(busy: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    np.save(tmp_path / "prompt.npy", np.array(PROMPT))
    files = [tmp_path / "prompt.json", tmp_path / "prompt.npy"]

    answers = [run_json("explain", *busy, "--tokens", file) for file in files]
    answers.append(run_json("explain", *busy, "--tokens", "-", stdin=json.dumps(PROMPT)))

    assert [(each["prefix_len"], each["reason"]) for each in answers] == [(16, "page_alignment")] * 3
    elsewhere = run("explain", *busy, "--tokens", files[0], "--lora-id", "other").stdout
    assert elsewhere == "0 of 20 tokens hit: what follows is there, but in another namespace\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1, 2", "Expecting ',' delimiter"),
        ('{"ids": [1]}', "not a list of token ids"),
        ("[1, -2]", "the token id at index 1 must be an integer in [0, 2**64), not -2"),
        ('[1, 2, "a"]', "the token id at index 2 must be an integer in [0, 2**64), not 'a'"),
        ("[true]", "the token id at index 0 must be an integer in [0, 2**64), not True"),
        ("[1, 2.5]", "the token id at index 1 must be an integer in [0, 2**64), not 2.5"),
        (f"[{2**64}]", f"the token id at index 0 must be an integer in [0, 2**64), not {2**64}"),
        ("[]", "no token ids, but at least one is needed"),
        ("[" * 100_000, "recursion"),
    ],
    ids=lambda text: text[:40],
)
def test_explain_names_the_fault_of_the_tokens(text: str, complaint: str) -> None:
    assert complaint in run("explain", "kv-0", "--tokens", "-", stdin=text, exit_code=2).stderr


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        (np.array([1, 2, -3]), "at index 2 must be an integer in [0, 2**64), not -3"),
        (np.array([1.0]), "at index 0 must be an integer in [0, 2**64), not 1.0"),
        (np.array([[1]]), "at index 0 must be an integer in [0, 2**64), not [1]"),
        (np.array(7), "not a list of token ids"),
    ],
    ids=str,
)
def test_explain_names_the_fault_of_an_array(tmp_path: Path, ids: Any, complaint: str) -> None:
    np.save(tmp_path / "ids.npy", ids)

    assert complaint in run("explain", "kv-0", "--tokens", tmp_path / "ids.npy", exit_code=2).stderr


@pytest.mark.parametrize("label", ["", "a" * 257])
def test_a_label_that_cannot_be_is_wrong_usage(label: str) -> None:
    complaint = run("weights", "kv-0", label, exit_code=2).stderr

    assert f"error: LABEL must be a text of 1 to 256 characters in UTF-8, not '{label[:20]}" in complaint


def test_tree_draws_the_cached_tokens(busy: list[str]) -> None:
    namespace, node = run_json("tree", *busy)["branches"]

    assert (namespace["num_tokens_below"], namespace["num_nodes"], namespace["is_whole"]) == (16, 2, True)
    assert (node["parent"], node["num_tokens"], node["tokens"]) == (0, 16, list(range(1, 9)))
    top, below, line = run("tree", *busy).stdout.splitlines()
    assert (top, below) == ("kv-0: 1 namespace", "└── no namespace: 16 tokens in 1 node")
    assert re.fullmatch(r"    └── 16 tokens, 0 hits, last used \S+ (s|min) ago  \[1 2 3 4 ...\]", line)
    assert run("tree", *busy, "--depth", 0).stdout.splitlines()[-1] == "    └── 1 more"


@pytest.mark.long
def test_weights_prints_the_label_and_names_another(namespace: str) -> None:
    where = ["--namespace", namespace]
    run("start", "--set", "pool.num_slots=64", *where)
    assert run("weights", "kv-0", *where).stdout == "kv-0: no weights are named yet\n"
    assert "weights" not in run("stats", "kv-0", *where).stdout
    with PrefixCacheClient(connect("kv-0", namespace=namespace)).sync as cache:
        with cache.acquire(PROMPT) as lease:
            lease.insert(PROMPT)

        (named,) = run_json("weights", "kv-0", "step-1", *where)

        assert (named["name"], named["label"], named["generation"] > 0) == ("kv-0", "step-1", True)
        assert cache.match(PROMPT).prefix_len == 0
        assert run_json("weights", "kv-0", "step-1", *where) == run_json("weights", "kv-0", *where) == [named]
    assert run("weights", "kv-0", *where).stdout == f"kv-0: weights 'step-1', generation {named['generation']}\n"
    assert re.search("weights +step-1", run("stats", "kv-0", *where).stdout)


@pytest.mark.long
def test_weights_acts_on_every_rank_of_a_name_in_order(namespace: str) -> None:
    where = ["--namespace", namespace]
    caches = [
        start_cache(CacheConfig(pool=PoolConfig(num_slots=64, device="cpu")), name=name, namespace=namespace)
        for name in ("kv-tp1", "kv-tp0", "kv-tpx", "other-tp0")
    ]

    done = run("weights", "kv", "step-1", *where).stdout

    assert [line.partition(",")[0] for line in done.splitlines()] == [
        "kv-tp0: weights 'step-1'",
        "kv-tp1: weights 'step-1'",
    ]
    assert [row["label"] for row in run_json("weights", "other", *where)] == [None]
    shutdown_cache(caches[1])
    missing = run("weights", "kv", "step-2", *where, exit_code=3).stderr
    assert "error: of the ranks of 'kv', up to kv-tp1, kv-tp0 does not run\n" in missing
    assert [row["label"] for row in run_json("weights", "kv-tp1", *where)] == ["step-1"]


def test_check_verifies_a_live_cache(busy: list[str]) -> None:
    assert run_json("check", *busy)["ok"] is True
    assert run("check", *busy).stdout.startswith("kv-0: every invariant holds, verified in ")


def test_check_reports_a_broken_rule(busy: list[str]) -> None:
    name, _, namespace = busy
    cache = connect(name, namespace=namespace)

    def change_held(num_pages: int) -> None:
        def change(actor: Any) -> None:
            actor._host.service.core.tenants.rest.private += num_pages

        ray.get(cache.__ray_call__.remote(change))

    change_held(1)
    result = run("check", *busy, exit_code=1)
    change_held(-1)

    assert result.stderr.startswith("error: a rule of the cache is broken: rule ")
    assert run_json("check", *busy)["ok"] is True


# ---------------------------------------------------------------- errors


def test_a_cache_that_is_not_there_is_an_error_that_names_those_that_are(busy: list[str]) -> None:
    _, *where = busy
    for command in ("stats", "check", "weights", "stop"):
        result = run(command, "kv-9", *where, exit_code=3)
        assert f"error: no cache named 'kv-9' runs in namespace {where[1]!r}; there: kv-0\n" in result.stderr
        assert result.stdout == ""
    error = run_json("stats", "kv-9", *where, exit_code=3)["error"]
    assert error["type"] == "CommandError"
    elsewhere = run("stats", "kv-0", "--namespace", "nowhere", exit_code=3).stderr
    assert f"there: none\n  try: --namespace, as there is kv-0 in {where[1]}" in elsewhere


def test_an_error_in_a_group_of_tasks_is_reported_as_if_there_were_no_group() -> None:
    error = InvalidRequest("a prompt needs at least one token id")

    failure = failure_of(ExceptionGroup("tasks", [ExceptionGroup("tasks", [error])]))

    assert failure == failure_of(error)
    assert failure_of(ExceptionGroup("tasks", [error, error])) is None


def test_wrong_settings_are_reported_before_any_request_to_ray(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("page_size: 8\npol: {num_slots: 64}\n")

    result = run("start", "-c", file, exit_code=2)

    assert f"error: {file}, line 2: pol: no such key\n  try: pool?" in result.stderr
    result = run("start", "-c", "-", stdin=file.read_text(), exit_code=2)
    assert "error: stdin, line 2: pol: no such key\n  try: pool?" in result.stderr


@pytest.mark.more
def test_a_cache_that_cannot_be_started_is_a_failure_and_not_a_cache_that_is_not_there(namespace: str) -> None:
    too_large = ["pool.num_slots=1_000_000", "pool.layers=[{count: 999, num_kv_heads: 1_000_000, head_dim: 999_999}]"]

    result = run(
        "start", *(word for option in too_large for word in ("--set", option)), "--namespace", namespace, exit_code=1
    )

    assert "lower pool.num_slots" in result.stderr
    assert "raydix list" not in result.stderr
    assert run_json("list", "--namespace", namespace) == []


def command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "raydix.actors.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        check=False,
    )


def test_a_file_with_values_of_none_is_reported_in_json(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("pool: {num_slots: 64}\nfingerprint: 2024-13-45\n")

    error = run_json("start", "-c", file, exit_code=2)["error"]

    assert (error["type"], error["advice"]) == ("SettingsError", "quote it if it is a text")
    assert error["message"] == f"{file}, line 2: not a YAML value: month must be in 1..12"


def test_a_process_of_its_own_finds_the_cluster_and_prints_json_alone(busy: list[str]) -> None:
    address = ray.get_runtime_context().gcs_address

    done = command("stats", *busy, "--json", RAY_ADDRESS=address)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["free_slots"] == 40


@pytest.mark.more
def test_where_no_cluster_answers_the_command_says_so_soon() -> None:
    done = command("list", "--address", "127.0.0.1:1")

    assert done.returncode == 3
    assert done.stdout == ""
    assert "error: no Ray cluster answers at 127.0.0.1:1: " in done.stderr
    assert "try: " in done.stderr
    assert command("list", "--address", "nonsense").returncode == 2
