"""Every benchmark, and one table of what came of it.

    python -m benchmarks [group ...] [--quick] [--json FILE] [--plot FILE]

in the folder of the tests; `make bench ARGS="core --quick"` does it anywhere. Groups: core, service, eviction,
data-plane, scale, end-to-end; all, if none is named. With RAYDIX_BENCH_GATE set, it fails where a gate is missed in
each of three tries.
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

GROUPS = {  # and the module whose `figures` has them
    "core": "core_figures",
    "service": "service_figures",
    "eviction": "eviction_figures",
    "data-plane": "bench_data_plane",
    "scale": "bench_scale",
    "end-to-end": "bench_end_to_end",
}
GATED = "RAYDIX_BENCH_GATE" in os.environ  # set by `make bench`: elsewhere the figures are printed, not judged
MAX_TRIES = 3 if GATED else 1  # on a machine that does other things besides


def measured(group: str, quick: bool) -> list[Figure]:
    """The figures of a group, measured again while a gate is missed, a few times at most."""
    for _ in range(MAX_TRIES):
        found: list[Figure] = importlib.import_module(f"benchmarks.{GROUPS[group]}").figures(quick)
        if not any(figure.failed for figure in found):
            break
    return found


def main() -> None:
    """The table, and what the command line asks for besides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], help="all, if none is named")
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
