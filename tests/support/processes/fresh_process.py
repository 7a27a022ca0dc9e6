"""Programs in a Python process of their own, which finds what this one finds."""

import os
import subprocess
import sys


def run_fresh(program: str, stdin: str | None = None, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end; return its output and exit status."""
    return subprocess.run(
        [sys.executable, "-c", program],
        input=stdin,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ,
        capture_output=True,
        text=True,
    )
