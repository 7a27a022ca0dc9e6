"""Logs as JSON lines, with the cache, its epoch, the session and the lease that they speak of.

from raydix.actors.json_logs import log_as_json
log_as_json()  # in a client's process; a cache does so with CacheConfig(json_logs=True)
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import IO

FIELDS = ("cache", "epoch", "session", "lease", "owner")  # that a record may carry, by `extra`


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, those of `FIELDS` that are known, and the error.

    Args:
        always: fields of every record, unless it says otherwise.
    """

    def __init__(self, **always: str) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with what a terminal would obey escaped as JSON does."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
        }
        line |= {field: getattr(record, field) for field in FIELDS if hasattr(record, field)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return "".join([each if each.isprintable() else _escaped(each) for each in text])


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join([f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)])


def log_as_json(stream: IO[str] | None = None, level: int = logging.INFO, **always: str) -> logging.Handler:
    """Log what Raydix has to say in this process as JSON lines, to stderr or `stream`, and nowhere else.

    Done again, it takes the place of what was done before. Returns the handler.
    """
    logger = logging.getLogger("raydix")
    for handler in [each for each in logger.handlers if isinstance(each.formatter, JsonFormatter)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(**always))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler
