"""Names and values that callers give do nothing where they are shown, escaped and bounded; numbers have one form."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from support.models.bad_tensors import TENSORS_WITHOUT_A_ROW
from support.processes.command_line import run

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.cli.cluster import cache_handle
from raydix.actors.cli.failures import CommandError
from raydix.actors.cli.output import show
from raydix.actors.observe.json_logs import JsonFormatter
from raydix.actors.report.page import render
from raydix.actors.transport.ray_calls import from_ray
from raydix.schemas import (
    CacheConfig,
    LeaseOwner,
    MatchRequest,
    PoolConfig,
    PoolExhausted,
    StartRecording,
    TenantConfig,
)
from raydix.schemas.message import receive
from raydix.schemas.shown import (
    brief,
    byte_size,
    counted,
    measured_time,
    percent,
    points,
    rate,
    short_count,
    short_time,
    shown,
    shown_text,
)

EVIL = "\x1b]0;owned\x07\x9b31m\u202e\u2028\u200b\r\n\ud800[red]x[/red][link=http://x]y[/link]"
ESCAPED = r"\x1b]0;owned\x07\x9b31m\u202e\u2028\u200b\r\n\ud800[red]x[/red][link=http://x]y[/link]"


def is_harmless(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


def test_a_name_is_shown_with_what_a_terminal_would_obey_escaped() -> None:
    assert shown(EVIL) == ESCAPED
    assert shown("Köln 東京 [1]\\x1b") == "Köln 東京 [1]\\x1b"
    assert shown_text("two\nlines\t\x1b") == "two\nlines\t\\x1b"


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        b"x" * 10**6,
        10**5000,
        -(10**5000),
        list(range(10**6)),
        np.zeros(10**6),
        torch.zeros(10**6),
        *TENSORS_WITHOUT_A_ROW,
        {"a": [["x" * 100] * 100] * 100},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_at_a_bounded_length(value: Any) -> None:
    assert 0 < len(brief(value)) <= 160


def test_a_value_with_the_same_list_many_times_in_it_is_not_walked() -> None:
    value: list[Any] = ["x" * 9] * 9
    for _ in range(40):
        value = [value] * 9

    assert brief(value).startswith("[[[...], [...], ")  # a walk of all of it would not end
    assert len(brief(value)) <= 160


def test_a_value_that_has_no_repr_is_shown_by_its_type() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    assert brief(Mute()).startswith("<Mute instance at ")
    assert (brief(7), brief(2.5), brief(None), brief("\x1b")) == ("7", "2.5", "None", r"'\x1b'")


@pytest.mark.parametrize(
    "make", [CacheConfig, PoolConfig, TenantConfig, StartRecording], ids=lambda kind: kind.__name__
)
def test_a_model_that_refuses_a_value_does_not_show_it(make: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**dict.fromkeys(make.model_fields, "a secret salt"), another=9)

    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- where names are shown


def test_an_exhausted_pool_escapes_the_names_of_owners_and_tenants() -> None:
    owner = LeaseOwner(owner=EVIL, leases=2, slots=4, oldest_s=7)

    text = str(PoolExhausted(6, 2, 1, 5, 3, True, "slots", (owner,), EVIL))

    assert f"{ESCAPED} 4 slots by 2 leases" in text
    assert is_harmless(text)
    assert "\n" not in text


@pytest.mark.parametrize("what", [f"a {EVIL} b", Text(EVIL), Tree(Text(EVIL))], ids=lambda value: type(value).__name__)
def test_what_commands_print_is_escaped(what: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show(None, False, lambda: what)

    text = capsys.readouterr().out
    assert r"\x9b31m\u202e\u2028\u200b" in text
    assert r"\x1b]0;owned" in text
    assert "[red]x[/red][link=http://x]y[/link]" in text
    assert is_harmless(text)


def test_a_table_makes_room_for_what_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title="\x1b[31mtitle", caption="\x1b[31mcaption")
    table.add_column("\x1b[31mhead", no_wrap=True)
    table.add_row("\x1b[31mcell[red]")

    show(None, False, lambda: table)

    text = capsys.readouterr().out
    assert [part for part in ("title", "caption", "head", "cell[red]") if f"\\x1b[31m{part}" not in text] == []
    assert is_harmless(text)


def test_a_failed_command_escapes_what_it_names() -> None:
    text = run("start", "-c", "/\x1b[31m\u202e.yaml", exit_code=2).stderr

    assert r"/\x1b[31m\u202e.yaml: No such file" in text
    assert is_harmless(text)


@pytest.mark.parametrize("name", ["", "../../x", "\x1b[31m", "x" * 129], ids=shown)
def test_caches_are_started_by_names_alone(name: str) -> None:
    text = run("start", "--name", name, "--set", "pool.num_slots=64", exit_code=2).stderr

    assert text.startswith("error: --name: name: must ")
    assert is_harmless(text)


def test_a_cache_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.actors.cluster.deploy.find_caches", lambda **_: {EVIL: None})
    monkeypatch.setattr(
        "raydix.actors.cli.cluster._named_actors", lambda: [{"name": "kv-0", "namespace": f"a{EVIL}"}, {"name": EVIL}]
    )

    with pytest.raises(CommandError) as caught:
        cache_handle("kv-0", EVIL)

    assert caught.value.message == f"no cache named 'kv-0' runs in namespace '{ESCAPED}'; there: {ESCAPED}"
    assert caught.value.advice == f"--namespace, as there is kv-0 in a{ESCAPED}"


def test_a_line_of_json_escapes_as_json_does() -> None:
    record = logging.LogRecord("raydix", logging.INFO, "", 0, "%s", (f"ok ö 東 {EVIL} \x7f \U000e0001",), None)

    line = JsonFormatter().format(record)

    assert line.isprintable()
    assert "ok ö 東 " in line
    assert json.loads(line)["message"] == record.getMessage()


async def test_the_log_of_a_lost_session_escapes_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    async with LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8))) as cache:
        client = await PrefixCacheClient(cache, owner=EVIL.replace("\ud800", "")).open()
        cache._host.service.reaper.owner_unavailable(client.session.session_id, is_dead=True)

        (text,) = [each.getMessage() for each in caplog.records if "its leases have ended" in each.getMessage()]
        assert r"(\x1b]0;owned\x07\x9b31m\u202e" in text
        assert text.isprintable()


async def test_a_report_escapes_its_title_and_its_namespaces() -> None:
    async with LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8))) as cache:
        async with await cache.acquire([1, 2], extra_key="a\x1b\u202eb") as lease:
            await lease.insert([1, 2])

        page = render(cache.report(), cache.config, title="t\x1b\u202e")

    assert "<title>t\\x1b\\u202e" in page
    assert "extra_key=a\\x1b\\u202eb" in page
    assert is_harmless(page)


def test_what_a_peer_sends_is_escaped_where_it_is_refused() -> None:
    class Hostile:
        def __array__(self, *of: Any, **how: Any) -> Any:
            raise TypeError(EVIL)

    refused = str(receive(MatchRequest, Hostile(), None))

    assert ESCAPED in refused
    assert refused.isprintable()
    assert str(from_ray(RuntimeError(f"{EVIL}"))).isprintable()


@pytest.mark.parametrize(("value", "expected"), [(0, "0"), (950, "950"), (1_234, "1.2k"), (34e6, "34M"), (2e9, "2G")])
def test_counts_are_short(value: float, expected: str) -> None:
    assert short_count(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0 s"), (59, "59 s"), (90, "1.5 min"), (7200, "2 h"), (9e5, "10 d")]
)
def test_times_are_short(value: float, expected: str) -> None:
    assert short_time(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 ms"), (0.000312, "0.312 ms"), (0.0298, "30 ms"), (0.5044, "504 ms"), (2.241, "2.24 s"), (1234, "1,234 s")],
)
def test_measured_times_have_up_to_three_digits(seconds: float, expected: str) -> None:
    assert measured_time(seconds) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(1, "1 byte"), (1000, "1,000 bytes"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (131084000131072, "119 TiB")],
)
def test_bytes_are_in_the_largest_unit_that_fits(num_bytes: int, expected: str) -> None:
    assert byte_size(num_bytes) == expected


def test_a_number_has_its_noun_in_the_singular_or_plural() -> None:
    assert [counted(number, "namespace") for number in (0, 1, 2)] == ["0 namespaces", "1 namespace", "2 namespaces"]
    assert [counted(2048, noun) for noun in ("batch", "page", "use", "open lease", "query", "day")] == [
        "2,048 batches",
        "2,048 pages",
        "2,048 uses",
        "2,048 open leases",
        "2,048 queries",
        "2,048 days",
    ]
    assert counted(1, "token", "+") == "1+ tokens"


def test_a_share_is_in_percent_and_a_share_of_nothing_is_none() -> None:
    assert (percent(0.3441), percent(0.9, 0), rate(1, 3, 2), rate(1, 0)) == ("34.4 %", "90 %", "33.33 %", "-")
    assert points(-0.012) == "-1.2"
