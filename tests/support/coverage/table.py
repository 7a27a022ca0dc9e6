"""Prints the line and branch coverage of each package and folder, from coverage.py's JSON reports.

table.py REPORT ...: two columns for each report, such as that of `make test`, and that of it and `make test-more`.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def totals_of(report: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the counts of each package and each folder of one."""
    totals: dict[str, Counter[str]] = {}
    for path, measured in report["files"].items():
        package, *folders = Path(path).parts[:-1]
        for name in {package, "/".join([package, *folders])}:
            totals.setdefault(name, Counter()).update({count: measured["summary"][count] for count in COUNTS})
    return totals


def table(reports: dict[str, dict[str, Any]]) -> list[str]:
    """Return a heading, and a line for each package and folder.

    Args:
        reports: by their names.
    """
    totals = {name: totals_of(report) for name, report in reports.items()}
    heading = "".join(f" {name + ': lines':>14} {'branches':>9}" for name in reports)
    lines = [f"{'':28}{heading}"]
    for folder in sorted({folder for each in totals.values() for folder in each}):
        cells = ""
        for of_report in totals.values():
            covered, statements, taken, branches = (of_report.get(folder, Counter())[count] for count in COUNTS)
            cells += f" {percent(covered, statements):>14} {percent(taken, branches):>9}"
        lines.append(f"{folder:28}{cells}")
    return lines


def percent(part: int, whole: int) -> str:
    """Return a share in percent, to a hundredth."""
    return f"{100 * part / whole:.2f} %" if whole else "-"


if __name__ == "__main__":
    print("\n".join(table({Path(path).stem: json.loads(Path(path).read_text()) for path in sys.argv[1:]})))
