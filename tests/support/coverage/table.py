"""Prints the line and branch coverage of each package and folder, from coverage.py's JSON report: `table.py REPORT`."""

import json
import sys
from collections import Counter
from pathlib import Path

COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def table(report: dict[str, dict[str, dict[str, dict[str, int]]]]) -> list[str]:
    """Return a line for each package and each folder of one."""
    totals: dict[str, Counter[str]] = {}
    for path, measured in report["files"].items():
        package, *folders = Path(path).parts[:-1]
        for name in {package, "/".join([package, *folders])}:
            totals.setdefault(name, Counter()).update({count: measured["summary"][count] for count in COUNTS})
    lines = [f"{'':28} {'lines':>8} {'branches':>9}"]
    for name, total in sorted(totals.items()):
        covered, statements, taken, branches = (total[count] for count in COUNTS)
        lines.append(f"{name:28} {percent(covered, statements):>8} {percent(taken, branches):>9}")
    return lines


def percent(part: int, whole: int) -> str:
    """Return a share in percent, to a hundredth."""
    return f"{100 * part / whole:.2f} %" if whole else "-"


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))
