"""Logs as JSON lines, with the cache, its epoch, and the session and lease of each message.

from raydix.actors.observe.json_logs import log_as_json
log_as_json()  # in a client's process; for a cache set CacheConfig(json_logs=True)
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import IO

FIELDS = ("cache", "epoch", "session", "lease", "owner")  # attributes that a record may have, by `extra`


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object: time (UTC), level, logger, message, known `FIELDS`, and the error.

    Args:
        always: fields of every record; the record's fields override them.
    """

    def __init__(self, **always: str) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with control characters escaped as in JSON."""
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
        return "".join([character if character.isprintable() else _escaped(character) for character in text])


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join([f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)])


def log_as_json(stream: IO[str] | None = None, level: int = logging.INFO, **always: str) -> logging.Handler:
    """Write the logs of Raydix in this process as JSON lines to stderr or `stream`, and nowhere else.

    A second call replaces the first. Returns the handler.
    """
    logger = logging.getLogger("raydix")
    for handler in [old for old in logger.handlers if isinstance(old.formatter, JsonFormatter)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(**always))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler
