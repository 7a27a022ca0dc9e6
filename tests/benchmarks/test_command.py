"""The benchmark command: tiny runs of its groups, its table, files and gates. No test here depends on time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import (
    bench_data_plane,
    bench_disk,
    bench_disk_peers,
    bench_end_to_end,
    bench_scale,
    bench_tier_writes,
    disk_figures,
    tier_rates,
    tier_speed,
)
from benchmarks.bench_data_plane import PAGE, Plane
from benchmarks.figures import Figure
from support.caches.pool_layers import layer_shapes
from support.models.sample_trace import PROMPTS, write_trace

from raydix.actors.observe.trace import read_trace
from raydix.cache_core import KVPool, PoolLayout
from raydix.schemas import HostConfig

pytestmark = pytest.mark.benchmark

LAYOUT = PoolLayout(256, PAGE, layer_shapes(("full",), 2, 8), torch.bfloat16)
FIGURES = [
    Figure("scale", "as promised", 1.25, "us", 1.2, "small", at_most=1.5, gate=1.5),
    Figure("scale", "missed, within its gate", 2_000.0, "1/s", 3.5, "no-op calls", at_least=4, gate=2),
    Figure("scale", "without a goal", 12.34, "B"),
]
BROKEN = Figure("scale", "broken", 1.0, "1/s", 1.0, "no-op calls", at_least=4, gate=2)


def run(monkeypatch: pytest.MonkeyPatch, figures: list[Figure], *arguments: str) -> None:
    monkeypatch.setattr(bench_scale, "figures", lambda quick: figures)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    command.main()


def test_a_figure_knows_whether_its_goal_is_met() -> None:
    assert [each.met for each in FIGURES] == [True, False, None]
    assert [each.failed for each in [*FIGURES, BROKEN]] == [False, False, False, True]
    assert Figure("scale", "a value", 9.0, "B", at_most=8).met is False
    assert [each.measured for each in FIGURES] == ["1.25 us", "2,000 1/s", "12.3 B"]


@pytest.mark.parametrize("limits", [{"at_most": 7, "gate": 4.5}, {"at_least": 4, "gate": 5}])
def test_no_gate_is_tighter_than_its_goal(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="tighter than the goal"):
        Figure("core", "a request", 1.0, "us", **limits)


def test_the_table_has_a_line_for_each_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, FIGURES, "scale")

    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["group", "what", "measured", "ratio", "to", "goal", "met", "gate"]
    assert lines[0].split()[-4:] == ["<=", "1.5", "yes", "1.5"]
    assert "NO" in lines[1] and ">= 4" in lines[1]
    assert lines[2].endswith("12.3 B")
    assert lines[-1].startswith("1 of 2 goals met")


def test_the_figures_go_to_a_file_and_into_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, FIGURES, "scale", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"))

    written = json.loads((tmp_path / "a.json").read_text())
    assert [each["what"] for each in written] == [each.what for each in FIGURES]
    assert [each["met"] for each in written] == [True, False, None]
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_only_a_gate_that_is_missed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GATED", True)
    monkeypatch.setattr(command, "MAX_TRIES", 2)
    run(monkeypatch, FIGURES, "scale")

    with pytest.raises(SystemExit, match="missed by more than their gates allow: broken"):
        run(monkeypatch, [*FIGURES, BROKEN], "scale")


def test_a_figure_that_misses_its_gate_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [[BROKEN], [BROKEN], FIGURES, [BROKEN]]
    monkeypatch.setattr(command, "MAX_TRIES", 3)
    monkeypatch.setattr(bench_scale, "figures", lambda quick: outcomes.pop(0))

    assert command.measured("scale", True) is FIGURES
    assert outcomes == [[BROKEN]]


def test_an_unknown_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, FIGURES, "scales")


def test_a_group_that_needs_vllm_runs_only_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in command.GROUPS.values():
        monkeypatch.setattr(f"benchmarks.{module}.figures", lambda quick: [])
    monkeypatch.setattr(bench_disk_peers, "figures", lambda quick: FIGURES)

    run(monkeypatch, [])
    assert FIGURES[0].what not in capsys.readouterr().out

    run(monkeypatch, [], "disk-peers")
    assert FIGURES[0].what in capsys.readouterr().out


# ---------------------------------------------------------------- tiny runs


def test_the_data_plane_is_measured_in_every_layout() -> None:
    plane = Plane(KVPool(LAYOUT), num_tokens=64)

    found = list(bench_data_plane.plane_figures(plane, 1, "here"))
    assert len([each for each in found if each.at_least == 0.7]) == 2
    assert len([each for each in found if each.at_least == 0.4]) == 2
    assert all(each.value > 0 and each.ratio for each in found)


def test_a_plane_that_gathers_other_kv_than_was_written_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = Plane(KVPool(LAYOUT), num_tokens=64)
    monkeypatch.setattr(plane.pool, "gather", lambda layer, slots: (plane.k, plane.v))

    with pytest.raises(AssertionError, match="gathered K must equal the pool's K"):
        plane.check()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_requests_are_measured_in_a_tree(page_size: int) -> None:
    assert min(bench_scale.SizedTree(100, page_size).serve(10)) > 0


def test_a_cached_token_takes_few_bytes_besides_the_pool() -> None:
    held = bench_scale.of_conversations(50_000, PAGE)

    assert held.num_tokens >= 50_000
    assert held.num_bytes <= bench_scale.MAX_TOKEN_BYTES * held.num_tokens


async def test_a_steady_state_is_watched() -> None:
    growth = await bench_scale.steady_state(num_requests=300, num_traced=20, num_before=50)

    assert growth.num_traced == 20


async def test_prompts_hit_as_much_as_they_should() -> None:
    alone, speeds = await bench_end_to_end.measure(prompt_len=320, num_new=2, num_requests=1)

    assert alone.hit_rate == 0
    assert [each.hit_rate for each in speeds] == [0, 0.25, 0.5, 0.75, 0.95]


def test_the_rates_of_lower_tiers_are_those_of_the_traces_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAYDIX_TRACE", raising=False)
    assert tier_rates.figures(quick=False) == []
    monkeypatch.setenv("RAYDIX_TRACE", str(write_trace(tmp_path)))

    found = tier_rates.figures(quick=True)

    references = {
        "points off 11.80": 11.80,
        "points off 13.70": 13.70,
        "points off 28.71": 28.71,
        "blocks off 3.67": 3.67,
    }
    assert [figure.to for figure in found] == list(references)
    assert [figure.ratio for figure in found] == pytest.approx(
        [abs(figure.value - reference) for figure, reference in zip(found, references.values(), strict=True)]
    )
    assert all(figure.failed for figure in found)


async def test_misses_are_timed_with_and_without_a_host_tier() -> None:
    found = await tier_speed.misses(num_rounds=1, num_requests=3, token_bytes=64)

    assert [figure.to for figure in found] == ["without a tier", "beside a copy"]
    assert all(figure.ratio for figure in found)


def test_each_way_to_a_disk_is_measured_beside_a_plain_loop() -> None:
    if not bench_disk.has_direct_io():
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    with bench_disk.opened(2**16, 2**20) as disk:
        works = disk.works()
        for work in works.values():
            work()

    plain = {name for name in works if name.startswith("plain ")}
    assert {f"plain {name}" for name in works.keys() - plain} == plain and len(plain) == 6


def test_a_folder_without_direct_io_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_disk, "has_direct_io", lambda: False)

    assert disk_figures.figures(quick=True) == []
    assert "has no O_DIRECT: let TMPDIR name another folder" in capsys.readouterr().out


def test_copies_take_virtual_time(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, PROMPTS[:-1] * 4))
    host = HostConfig(num_slots=8 * 512)
    slow, fast = (bench_tier_writes.simulate(trace, host, bytes_per_s, pool_blocks=6) for bytes_per_s in (1, 1e12))

    assert slow.host.tokens_written == 0 < slow.host.tokens_dropped
    assert fast.host.tokens_written > 0 < fast.host.tokens_loaded
    assert fast.host.tokens_dropped < slow.host.tokens_dropped


def test_disks_are_not_measured_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_disk_peers, "find_spec", lambda name: None)

    assert bench_disk_peers.figures(quick=True) == []
    assert "vLLM is not installed: make bench ARGS=disk-peers" in capsys.readouterr().out


def test_one_bit_of_a_number_in_the_middle_of_a_record_is_flipped(tmp_path: Path) -> None:
    file = tmp_path / "records"
    before = np.ones(64, np.float32)
    before.tofile(file)

    bench_disk_peers.flip(file, 128, 128)

    after = np.fromfile(file, np.float32)
    assert np.flatnonzero(after != before).tolist() == [48]
    assert np.bitwise_xor(before.view(np.uint32), after.view(np.uint32))[48] == 1 << 30


def test_wrong_answers_of_our_own_disk_fail_and_those_of_a_peer_do_not() -> None:
    answers = [bench_disk_peers.Answer([1, 2], 0.1, 32), bench_disk_peers.Answer([], float("nan"), 0)]
    wrong = "right answers after one flipped byte in each prompt, Raydix"
    for name, failed in (("Raydix", [wrong]), ("LMCache", [])):
        course = bench_disk_peers.Course(name, 0, 1, 2, answers[:1] * 2, answers[:1] * 2, answers, [[1, 2], [1, 2]])

        found = list(bench_disk_peers.course_figures(course, length=64, kv_bytes=2))

        assert [figure.what for figure in found if figure.failed] == failed
        assert next(figure.ratio for figure in found if "used twice" in figure.what) == 1
