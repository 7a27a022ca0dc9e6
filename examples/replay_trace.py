"""Replay recorded traffic on an index-only cache, and print how much prefill a cache of each size saves.

    python examples/replay_trace.py trace.jsonl --capacity 1024000 4096000 16384000

Real traces, of an hour of chat each, are in the folder FAST25-release/traces of
https://github.com/kvcache-ai/Mooncake; `raydix.actors.observe.trace` describes their format. They contain hashes of
blocks of 512 tokens and no text. The replay expands each hash to 512 token ids, so that equal prefixes stay equal.

The cache is a Ray actor without tensors. `PrefixCacheClient` reaches it as a scheduler would. With
`--local` the same cache runs in this process, without Ray. The command `raydix replay` also compares policies and page
sizes, and draws the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from pathlib import Path

import ray
from pydantic import ValidationError

from raydix.actors.observe.trace import read_trace
from raydix.actors.replay.trace_replay import index_config, replay
from raydix.schemas import CacheError

DEFAULT_CAPACITIES = (1_024_000, 4_096_000, 16_384_000)


def count(text: str) -> int:
    """Return a count given on the command line."""
    if not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", default=os.environ.get("RAYDIX_TRACE"), help="or RAYDIX_TRACE")
    parser.add_argument("--capacity", type=count, nargs="+", default=DEFAULT_CAPACITIES, metavar="TOKENS")
    parser.add_argument("--page-size", type=count, default=512, metavar="TOKENS")
    parser.add_argument("--limit", type=count, metavar="N", help="replay the first N requests only")
    parser.add_argument("--local", action="store_true", help="without Ray")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    if args.trace is None:
        parser.error("give the path of a trace, or set RAYDIX_TRACE")
    if args.json is not None:
        try:
            args.json.open("a").close()  # fail before the replay, not after it
        except OSError as error:
            parser.error(f"{args.json}: {error.strerror}")
    return args


def main() -> None:
    """Replay the trace at each capacity, and print a line for each."""
    args = arguments()
    try:
        trace = read_trace(Path(args.trace), args.limit)
        configs = [index_config(capacity, page_size=args.page_size) for capacity in args.capacity]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        sys.exit(f"error: {where}{first['msg'].removeprefix('Value error, ')}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not args.local:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rows = []
    for config in configs:
        try:
            done = asyncio.run(replay(trace, config, on_ray=not args.local))
        except CacheError as error:
            sys.exit(f"error: {error}")
        rows.append(row := done.figures())
        print(f"{row['capacity']:>12,} tokens: {row['hit_rate_percent']:5.1f} % hit, {row['evicted_tokens']:,} evicted")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
