"""`raydix replay` counts exactly on a trace made by hand, compares policies, and gives the published rates."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import ray
import typer
from packaging.version import Version
from support.models.sample_trace import EVICTED, PROMPT_TOKENS, PROMPTS, REUSED, recorded_trace, write_trace
from support.processes.command_line import run, run_json

from raydix.actors.observe.trace import TracedRequest, TraceError, read_trace
from raydix.actors.replay.trace_replay import index_config, replay


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path)


@pytest.mark.parametrize("where", [pytest.param([], id="here"), pytest.param(["--ray"], marks=pytest.mark.ray)])
def test_a_trace_made_by_hand_gives_exact_counts(where: list[str], trace: Path, request: pytest.FixtureRequest) -> None:
    if where:
        request.getfixturevalue("ray_cluster")

    (row,) = run_json("replay", trace, "--capacity", 4 * 512, *where)

    assert (row["requests"], row["prompt_tokens"], row["too_large"]) == (8, PROMPT_TOKENS, 1)
    assert (row["reused_tokens"], row["evicted_tokens"]) == (REUSED, EVICTED)
    assert row["hit_rate_percent"] == pytest.approx(100 * REUSED / PROMPT_TOKENS)


def test_a_run_reports_the_hits_of_twice_the_capacity(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [(512, [1]), (512, [2]), (512, [1]), (512, [2])])

    (row,) = run_json("replay", trace, "--capacity", 512, "--ghost")
    text = run("replay", trace, "--capacity", 512, "--ghost").stdout

    assert (row["reused_tokens"], row["ghost"]["tokens_requested"]) == (0, 2048)
    assert "512 tokens: twice as many would change the hit rate by about +50.0 points, to 50.0 %" in " ".join(
        text.split()
    )


def test_a_host_tier_gives_back_the_evicted_tokens_and_their_share_is_named(tmp_path: Path) -> None:
    prompts = [(1024, [1, 2]), (1024, [3, 4]), (1024, [1, 2]), (512, [1]), (1024, [3, 4])]
    sizes = ("--capacity", 1024, "--host-capacity", "4x", "--host-capacity", "8k", "--host-policy", "2q")

    large, larger = run_json("replay", write_trace(tmp_path, prompts), *sizes)
    text = run("replay", tmp_path / "trace.jsonl", *sizes[:4]).stdout

    assert (large["reused_tokens"], large["evicted_tokens"]) == (1024 + 512 + 1024, 3 * 1024)
    tokens = {"loaded_tokens": 2048, "written_tokens": 2048, "dropped_tokens": 0, "written_pages_per_request": 4 / 5}
    assert large["device_hit_rate_percent"] == pytest.approx(100 * 512 / 4608)
    assert large["host"] == {"capacity": 4096, "policy": "2q", **tokens, "loaded_percent": 100 * 2048 / 4608}
    assert larger["host"] == large["host"] | {"capacity": 7680}
    assert "1,024 lru 4.1k 2q 55.56 % 11.11 % 44.44 % 3.1k" in " ".join(text.split())


def test_a_disk_tier_gets_a_page_at_its_second_use_and_its_share_is_named(tmp_path: Path) -> None:
    prompts = [(1024, [1, 2]), (1024, [3, 4]), (1024, [1, 2]), (1024, [3, 4]), (1024, [1, 2]), (512, [5]), (512, [3])]
    sizes = ("--capacity", 1024, "--disk-capacity", "4x", "--disk-admit", "second_use", "--disk-admit", "all")

    second, every = run_json("replay", write_trace(tmp_path, prompts), *sizes)
    text = run("replay", tmp_path / "trace.jsonl", *sizes[:4], "--host-capacity", 1024, "--host-policy", "lru").stdout

    # Pages 1 to 4 are computed twice, and written then. Their third uses load them.
    assert (second["reused_tokens"], second["device_hit_rate_percent"]) == (1024 + 512, 0)
    tokens = {"loaded_tokens": 1536, "written_tokens": 2048, "dropped_tokens": 0, "written_pages_per_request": 4 / 7}
    share = {"loaded_percent": pytest.approx(100 * 1536 / 6144)}
    assert second["disk"] == {"capacity": 4096, "admit": "second_use", **tokens, **share}
    # All pages are written when they are evicted, and loaded by their second uses.
    tokens |= {"loaded_tokens": 3 * 1024 + 512}
    assert every["disk"] == {"capacity": 4096, "admit": "all", **tokens, "loaded_percent": 100 * 3584 / 6144}
    assert "1k lru 1k lru 4.1k second_use 41.67 % 33.33 % 8.33 % 2k" in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--host-policy", "lru"), "--host-policy must come with --host-capacity\n  try: --host-capacity 4x"),
        (("--host-capacity", "4x", "--ghost"), "--ghost does not go with --host-capacity: it estimates caches without"),
        (("--host-capacity", "4x", "--ray"), "--ray does not go with --host-capacity: the tiers of a replay are in"),
        (("--disk-admit", "all"), "--disk-admit must come with --disk-capacity\n  try: --disk-capacity 4x"),
        (("--disk-capacity", "4x", "--ghost"), "--ghost does not go with --disk-capacity: it estimates caches without"),
        (("--disk-capacity", "1TiB"), "--disk-capacity must be tokens, such as 200_000 or 1M, not '1TiB': a trace"),
        (("--disk-capacity", "500"), "--disk-capacity must hold a page, 512 tokens, not '500'"),
        (("--disk-capacity", "4x", "--disk-admit", "none"), "--disk-admit must be 'second_use' or 'all'"),
        (
            ("--host-capacity", "1GiB"),
            "--host-capacity must be tokens, such as 200_000 or 1M, not '1GiB': a trace does",
        ),
        (("--host-capacity", "500"), "--host-capacity must hold a page, 512 tokens, not '500'"),
        (("--host-capacity", "4x", "--host-policy", "lur"), "--host-policy must be 'lru', 'lfu'"),
        (("--host-capacity", "4x", "--policy", "lur"), "--policy must be 'lru', 'lfu'"),
    ],
)
def test_options_of_lower_tiers_are_checked_before_the_work(
    trace: Path, options: tuple[object, ...], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.actors.cli.replay._replay_all", lambda *_: pytest.fail("it was replayed"))

    assert f"error: {complaint}" in run("replay", trace, *options, exit_code=2).stderr


@pytest.mark.more
@pytest.mark.ray
async def test_a_replay_that_is_broken_off_leaves_no_cache_behind(
    trace: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(
        "raydix.actors.cluster.deploy.shutdown_cache", lambda cache: ended.append(cache) or ray.kill(cache)
    )

    def broken_off(done: int) -> None:
        if done:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        await replay(read_trace(trace), index_config(2048), on_ray=True, progress=broken_off)

    assert len(ended) == 1


def test_requests_that_can_never_fit_are_named_first_and_in_no_rate(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [*PROMPTS, PROMPTS[-1]])

    (row,) = run_json("replay", trace, "--capacity", 2048, "--ghost")
    text = " ".join(run("replay", trace, "--capacity", 2048, "--ghost").stdout.split())

    tokens, too_large = PROMPT_TOKENS, 2 * PROMPTS[-1][0]
    assert (row["too_large"], row["prompt_tokens"], row["ghost"]["tokens_requested"]) == (2, tokens, tokens)
    assert row["hit_rate_percent"] == pytest.approx(100 * REUSED / tokens)
    assert text.startswith(
        f"2 requests, {100 * too_large / (tokens + too_large):.1f} % of the prompt tokens, can never fit in 2,048 "
        "slots and are in no hit rate; the largest needs a capacity of 2,560 "
    )
    (twice,) = run_json("replay", write_trace(tmp_path, PROMPTS[:-1]), "--capacity", 4096)
    estimate = dict(zip(row["ghost"]["num_slots"], row["ghost"]["hit_rates"], strict=True))[4096]
    assert 100 * estimate == pytest.approx(twice["hit_rate_percent"])


def test_a_trace_of_smaller_blocks_has_tokens_of_its_own_for_each() -> None:
    def tokens(block_size: int, ids: list[int]) -> np.ndarray:
        length = block_size * len(ids)
        fields = {"timestamp": 0, "input_length": length, "output_length": 0, "hash_ids": ids}
        return TracedRequest(**fields, block_size=block_size).tokens().reshape(len(ids), block_size)

    for block_size in (1, 3, 16, 512):
        ids = [0, 1, 1 + 2**55, 1 + 2**63, 2**64 - 1]
        rows = tokens(block_size, [*ids, 1])
        assert rows[1].tolist() == rows[-1].tolist()
        assert len({row.tobytes() for row in rows}) == len(ids)


def test_ids_of_64_bits_stand_for_tokens_of_their_own() -> None:
    ids = [1, 1 + 2**55, 1 + 2**63, 2**64 - 1]

    tokens = TracedRequest(timestamp=0, input_length=512 * 4, output_length=0, hash_ids=ids).tokens().reshape(4, 512)

    assert len({row.tobytes() for row in tokens}) == 4


def test_every_combination_stands_in_the_table_side_by_side(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [(600, [1, 9]), (512, [2]), (512, [1]), (512, [3]), (600, [1, 9])])
    sweep = ("--capacity", 1024, "--capacity", 4096, "--policy", "lru", "--policy", "mru", "--page-size", 512)

    rows = run_json("replay", trace, *sweep, "--page-size", 64)
    text = run("replay", trace, *sweep).stdout

    wanted = [(c, policy, page) for c in (1024, 4096) for policy in ("lru", "mru") for page in (512, 64)]
    assert [(row["capacity"], row["policy"], row["page_size"]) for row in rows] == wanted
    reused = {each: row["reused_tokens"] for each, row in zip(wanted, rows, strict=True)}
    assert reused[1024, "lru", 512] == 1024  # evicts page 2
    assert reused[1024, "mru", 512] == 512  # evicts page 1, the last one used
    assert reused[4096, "lru", 64] == 1024 + 64  # of the partial block, too
    printed = [line.split()[:3] for line in text.splitlines() if "512" in line]
    assert printed == [
        ["1,024", "lru", "512"],
        ["1,024", "mru", "512"],
        ["4,096", "lru", "512"],
        ["4,096", "mru", "512"],
    ]


def test_a_limit_and_a_plot(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"

    rows = run_json("replay", trace, "--limit", 3, "--capacity", 2048, "--capacity", 4096, "--plot", picture)

    assert [(row["capacity"], row["requests"], row["evicted_tokens"]) for row in rows] == [(2048, 3, 512), (4096, 3, 0)]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_names_every_replay_in_one_capacity_as_bars_and_in_several_as_lines(trace: Path, tmp_path: Path) -> None:
    policies = ("--policy", "lru", "--policy", "mru")
    bars, lines = tmp_path / "bars.svg", tmp_path / "lines.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        run("replay", trace, "--capacity", 2048, *policies, "--plot", bars)
        run("replay", trace, "--capacity", 2048, "--capacity", 4096, *policies, "--plot", lines)

    for picture, title in ((bars, "Hit rate of 2,048 tokens"), (lines, "Hit rate against capacity")):
        text = picture.read_text()
        assert [name in text for name in (title, "2,048 tokens, lru, pages of 512", "2,048 tokens, mru")] == [True] * 3


def test_a_capacity_is_rounded_down_to_whole_pages_of_each_replay(trace: Path) -> None:
    rows = run_json("replay", trace, "--capacity", "1M", "--capacity", "3k", "--page-size", 512, "--page-size", 1024)

    assert [row["capacity"] for row in rows] == [999_936, 999_424, 2560, 2048]


def test_background_eviction_can_be_switched_on(trace: Path) -> None:
    (row,) = run_json("replay", trace, "--capacity", 2048, "--high-watermark", 0.5)

    assert row["evicted_tokens"] > EVICTED


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--capacity", 500), "--capacity must hold a page, 512 tokens, not '500', which is 500 tokens\n  try: 512000"),
        (("--capacity", 2048, "--policy", "lur"), "--policy must be 'lru', 'lfu'"),
        (("--capacity", 2048, "--plot", "rates.nope"), "rates.nope: Format 'nope' is not supported"),
        (("--capacity", 2048, "--plot", "no/rates.png"), "no/rates.png: No such file or directory"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_with_advice_before_the_work(
    trace: Path, options: tuple[object, ...], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.actors.cli.replay._replay_all", lambda *_: pytest.fail("it was replayed"))

    assert f"error: {complaint}" in run("replay", trace, *options, exit_code=2).stderr


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Invalid JSON"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "line 2: hash_ids: must be given"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 2: input_length: "),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]}', "600 tokens need 2 hash ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-4]}', "must not be negative"),
        (
            f'{{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [{2**65}]}}',
            "line 2: .*ids must be below",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [4], "block_size": 16}',
            "line 2: block_size must be the same on all lines; it is 16, but 512 on earlier lines",
        ),
    ],
)
def test_a_malformed_line_is_named_with_its_fault(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [4]}\n' + line)

    with pytest.raises(TraceError, match=complaint):
        read_trace(path)
    assert re.search(complaint, run("replay", path, exit_code=2).stderr)


@pytest.mark.parametrize(
    "time", ["1e400", "Infinity", "-Infinity", "NaN", "-1", "1e300", "9" * 400, '"5"', "true", "null"]
)
def test_a_wrong_timestamp_is_refused_with_its_line(tmp_path: Path, time: str) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        f'{{"timestamp": {each}, "input_length": 5, "output_length": 1, "hash_ids": [4]}}\n' for each in ("0", time)
    ]
    path.write_text("".join(rows))

    for command in ("replay", "report"):
        assert f"error: {path}, line 2: timestamp: must be " in run(command, path, exit_code=2).stderr


@pytest.mark.parametrize(
    ("name", "complaint", "advice"),
    [
        ("none", "No such file", "give the path of a trace"),
        (".", "Is a directory", "give the path of a trace"),
        ("empty", "the trace has no requests", "record for longer"),
    ],
)
def test_a_trace_that_is_not_there_or_empty_is_named(tmp_path: Path, name: str, complaint: str, advice: str) -> None:
    (tmp_path / "empty").touch()

    for command in (("replay",), ("fleet", "replay")):
        message = run(*command, tmp_path / name, exit_code=2).stderr
        assert complaint in message
        assert f"try: {advice}" in message


@pytest.mark.parametrize(
    ("arguments", "complaint", "of_old_typer", "command"),
    [
        (
            ("replay", "t", "--limit", 0),
            "--limit must be greater than or equal to 1, not '0'",
            "--limit: 0 is not in the range x>=1",
            "replay",
        ),
        (
            ("stop", "a", "--drain", "60s"),
            "--drain must be a valid number, not '60s'",
            "--drain: '60s' is not a valid float range",
            "stop",
        ),
        (
            ("fleet", "replay", "t", "--seeds", "x"),
            "--seeds must be a whole number, not 'x'",
            "--seeds: 'x' is not a valid integer range",
            "fleet replay",
        ),
    ],
)
def test_a_wrong_value_of_an_option_is_shown_also_as_json(
    arguments: tuple[object, ...], complaint: str, of_old_typer: str, command: str
) -> None:
    if Version(typer.__version__) < Version("0.29"):  # it checks values without pydantic
        complaint = of_old_typer

    assert f"error: {complaint}\n  try: raydix {command} --help" in run(*arguments, exit_code=2).stderr
    assert run_json(*arguments, exit_code=2)["error"]["message"] == complaint


def test_equal_ids_are_equal_blocks_and_other_ids_other_blocks() -> None:
    def tokens(length: int, ids: list[int]) -> np.ndarray:
        return TracedRequest(timestamp=0, input_length=length, output_length=0, hash_ids=ids).tokens()

    one, other = tokens(1024, [182_789, 3]), tokens(700, [3, 182_789])

    assert one.dtype == np.uint32
    assert one[512:].tolist() == other[:512].tolist()
    assert one[:188].tolist() == other[512:].tolist()
    assert len(np.unique(one)) == 1024


@pytest.mark.timeout(900)
@pytest.mark.trace
def test_the_conversation_trace_gives_the_rates_of_a_whole_page_lru() -> None:
    """An independent simulation of whole pages of 512 and least-recently-used leaves gave these rates."""
    capacities = ("--capacity", 1_024_000, "--capacity", 4_096_000, "--capacity", 16_384_000)

    rows = run_json("replay", os.environ["RAYDIX_TRACE"], *capacities)

    assert [row["requests"] for row in rows] == [12_031] * 3
    assert [row["hit_rate_percent"] for row in rows] == [pytest.approx(rate, abs=0.3) for rate in (5.64, 18.89, 34.39)]


@pytest.mark.timeout(900)
@pytest.mark.trace
def test_the_conversation_trace_gives_the_rates_of_two_queues() -> None:
    """An independent simulation of whole pages of 512, one evicted at a time, gave these rates."""
    capacities = ("--capacity", 1_024_000, "--capacity", 4_096_000)

    rows = run_json("replay", os.environ["RAYDIX_TRACE"], "--policy", "2q", *capacities)

    assert [row["hit_rate_percent"] for row in rows] == [pytest.approx(rate, abs=0.3) for rate in (7.72, 20.17)]


@pytest.mark.timeout(900)
@pytest.mark.trace
@pytest.mark.parametrize(("policy", "rates"), [("lru", (34.67, 74.61)), ("2q", (34.95, 74.25))])
def test_long_prompts_give_the_rates_of_pages_that_are_evicted_one_at_a_time(
    policy: str, rates: tuple[float, ...]
) -> None:
    """The leaves of agents are long: where each went whole, a tenth of the smaller pool would be empty."""
    capacities = ("--capacity", 512_000, "--capacity", 2_048_000)

    rows = run_json("replay", recorded_trace("agentsyn"), "--policy", policy, *capacities)

    assert [row["hit_rate_percent"] for row in rows] == [pytest.approx(rate, abs=0.5) for rate in rates]


@pytest.mark.timeout(900)
@pytest.mark.trace
@pytest.mark.parametrize(("policy", "rates", "within"), [("lru", (11.80, 20.11), 0.3), ("2q", (13.70, 21.70), 0.5)])
def test_the_conversation_trace_gives_the_rates_of_a_pool_and_its_host_tier(
    policy: str, rates: tuple[float, ...], within: float
) -> None:
    """An independent simulation of two tiers gave these rates, by whole pages of 512: 1,000 above 4,000 and 8,000."""
    hosts = ("--host-capacity", 4000 * 512, "--host-capacity", 8000 * 512, "--host-policy", policy)

    rows = run_json("replay", os.environ["RAYDIX_TRACE"], "--capacity", 1000 * 512, *hosts)

    assert [row["hit_rate_percent"] for row in rows] == [pytest.approx(rate, abs=within) for rate in rates]


@pytest.mark.timeout(900)
@pytest.mark.trace
@pytest.mark.parametrize(
    ("admit", "rate", "within", "written"), [("second_use", 28.71, 0.5, 3.67), ("all", 35.85, 0.3, 14.0)]
)
def test_the_conversation_trace_gives_the_rates_of_a_disk_below_the_host_tier(
    admit: str, rate: float, within: float, written: float
) -> None:
    """An independent simulation of three tiers gave these rates, and the pages that are written to the disk a request.

    Its memory of uses is endless.
    """
    sizes = ("--capacity", 1000 * 512, "--host-capacity", 8000 * 512, "--disk-capacity", 32_000 * 512)

    (row,) = run_json("replay", os.environ["RAYDIX_TRACE"], *sizes, "--host-policy", "lru", "--disk-admit", admit)

    assert row["hit_rate_percent"] == pytest.approx(rate, abs=within)
    assert row["disk"]["written_pages_per_request"] == pytest.approx(written, abs=0.5)


def test_a_gzip_trace_is_read_as_it_is_and_a_broken_one_is_named(trace: Path, tmp_path: Path) -> None:
    packed, cut = tmp_path / "trace.jsonl.gz", tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    cut.write_bytes(packed.read_bytes()[:-20])

    assert read_trace(packed) == read_trace(trace)
    with pytest.raises(TraceError, match=r"cut.gz: Compressed file ended"):
        read_trace(cut)
    (tmp_path / "plain.gz").write_bytes(trace.read_bytes())
    assert "plain.gz: Not a gzipped file" in run("replay", tmp_path / "plain.gz", exit_code=2).stderr


def timed_trace(path: Path, *times_ms: float) -> Path:
    rows = [{"timestamp": each, "input_length": 5, "output_length": 1, "hash_ids": [4]} for each in times_ms]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_times_count_from_the_first_one(tmp_path: Path) -> None:
    trace = timed_trace(tmp_path / "epoch.jsonl", 1.7e12, 1.7e12, 1.7e12 + 1500)

    assert [each.timestamp for each in read_trace(trace)] == [0, 0, 1500]
    told = run_json("report", trace, "--capacity", 512, "-o", tmp_path / "page.html")
    assert told["report"]["stats"]["uptime_s"] == 1.5


def test_times_that_fall_are_refused_with_their_line(tmp_path: Path) -> None:
    trace = timed_trace(tmp_path / "falling.jsonl", 200, 300, 250)

    for command in ("replay", "report"):
        message = run(command, trace, exit_code=2).stderr
        assert f"{trace}, line 3: timestamp must be at least 300, that of the line before, not 250: sort" in message
