"""Runs pytest in two processes at once: what shares the Ray cluster, which mostly waits, and all else, which computes.

Takes pytest's arguments. The first is shown as it goes, the other when it is done, and what failed at the end.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile

HALVES = ("shares_cluster and not long", "not shares_cluster and not long")
NOTHING_TO_DO = 5  # what pytest says where `-k` leaves nothing


def main(arguments: list[str]) -> int:
    """Run both halves; 0 if all passed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so would tests
    with tempfile.TemporaryFile("w+") as other_output:
        command = [sys.executable, "-m", "pytest", *arguments, "-m"]
        other = subprocess.Popen([*command, HALVES[1]], stdout=other_output, stderr=subprocess.STDOUT)
        first = subprocess.Popen([*command, HALVES[0]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert first.stdout is not None
        lines = []
        for line in first.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        codes = [first.wait(), other.wait()]
        other_output.seek(0)
        texts = ["".join(lines), other_output.read()]
    print(texts[1])
    for half, code, text in zip(HALVES, codes, texts, strict=True):
        if code not in (0, NOTHING_TO_DO):
            print(f"{half}:\n" + "\n".join(re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE)))
        print(f"{half}: {text.strip().splitlines()[-1]}")
    return next((code for code in codes if code not in (0, NOTHING_TO_DO)), min(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
