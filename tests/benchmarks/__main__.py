"""Run the benchmarks, and print one table of their figures.

    python -m benchmarks [group ...] [--quick] [--json FILE] [--plot FILE]

Run it in the tests' folder; `make bench ARGS="core --quick"` runs it from anywhere. Groups: core, service, eviction,
policies, data-plane, blocks, tiers, scale, fleet, end-to-end, commands; all by default. disk-peers, which needs vLLM,
runs only if it is named. With RAYDIX_BENCH_GATE set, it fails if a gate is missed in each of three tries.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from benchmarks.figures import HEADING, Figure
from benchmarks.report import as_json, draw

GROUPS = {  # each group, and the module with its `figures`
    "core": "core_figures",
    "service": "service_figures",
    "eviction": "eviction_figures",
    "policies": "policy_rates",
    "data-plane": "bench_data_plane",
    "blocks": "bench_blocks",
    "tiers": "tier_figures",
    "disk": "disk_figures",
    "scale": "bench_scale",
    "fleet": "bench_fleet",
    "end-to-end": "bench_end_to_end",
    "commands": "bench_commands",
}
NAMED = {"disk-peers": "bench_disk_peers"}  # as GROUPS: they run only if they are named
GATED = "RAYDIX_BENCH_GATE" in os.environ  # set by `make bench`: elsewhere the figures are printed, not judged
MAX_TRIES = 3 if GATED else 1  # the machine may be busy with other work


def measured(group: str, quick: bool) -> list[Figure]:
    """Return the figures of a group, measured again while a gate is missed, a few times at most."""
    modules = GROUPS | NAMED
    for _ in range(MAX_TRIES):
        found: list[Figure] = importlib.import_module(f"benchmarks.{modules[group]}").figures(quick)
        if not any(figure.failed for figure in found):
            break
    return found


def main() -> None:
    """Print the table, and write the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS, *NAMED], help="all but disk-peers, if none is named")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: within a minute")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--plot", type=Path, help="a file for a picture of the ratios to their goals: .svg or .png")
    args = parser.parse_args()
    found: list[Figure] = []
    started = time.monotonic()
    print(HEADING, flush=True)
    for group in args.groups or GROUPS:
        for figure in measured(group, args.quick):
            found.append(figure)
            print(figure.line(), flush=True)
    judged = [figure.met for figure in found if figure.met is not None]
    print(f"\n{sum(judged)} of {len(judged)} goals met, in {time.monotonic() - started:.0f} s")
    if args.json:
        args.json.write_text(as_json(found))
    if args.plot:
        draw(found, args.plot)
    if GATED and (failed := [figure.what for figure in found if figure.failed]):
        sys.exit(f"missed by more than their gates allow: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
