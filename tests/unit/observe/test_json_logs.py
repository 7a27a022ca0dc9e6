"""Logs as JSON lines: each has what it speaks of as fields of its own."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from raydix.actors.observe.json_logs import log_as_json


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """Raydix's logger, left as it was."""
    logger = logging.getLogger("raydix")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def test_a_line_has_the_cache_its_epoch_and_the_lease() -> None:
    stream = io.StringIO()
    log_as_json(stream, cache="kv-0", epoch="e1")

    logging.getLogger("raydix.actors.client.client_session").warning("lease %s ended", "l-7", extra={"lease": "l-7"})

    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "raydix.actors.client.client_session",
        "message": "lease l-7 ended",
        "cache": "kv-0",
        "epoch": "e1",
        "lease": "l-7",
    }


def test_what_a_record_says_goes_before_what_all_say() -> None:
    stream = io.StringIO()
    log_as_json(stream, epoch="e1")

    logging.getLogger("raydix.x").info("stale", extra={"epoch": "e0"})

    assert json.loads(stream.getvalue())["epoch"] == "e0"


def test_an_error_stays_on_its_line() -> None:
    stream = io.StringIO()
    log_as_json(stream)

    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("raydix.x").exception("it failed")

    (line,) = stream.getvalue().splitlines()
    assert "ValueError: two\nlines" in json.loads(line)["error"]


def test_done_twice_each_line_is_written_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    log_as_json(first)
    log_as_json(second)

    logging.getLogger("raydix.x").info("hello")

    assert (first.getvalue(), len(second.getvalue().splitlines())) == ("", 1)
