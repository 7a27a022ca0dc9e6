"""The version of this package, with the commit that it comes from, and how its extras are installed."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_BUILT_FROM = "commit.txt"  # setup.py writes it next to this module if it builds from a clone
_GIT_S = 5.0


@cache
def package_version() -> str:
    """Return the version, such as "0.2.0+1a2b3c4d5e6f", with the commit where it is known, else "0.2.0".

    ".dirty" follows the commit of a clone with changes. The version is "unknown" if the package is not installed.
    """
    try:
        number = version("raydix")
    except PackageNotFoundError:  # its files lie on the path
        number = "unknown"
    commit = find_commit()
    return f"{number}+{commit}" if commit else number


def how_to_install(extra: str) -> str:
    """Return how a user installs the packages of an extra, such as "zmq". Raydix is in no package index."""
    return f"in the clone: pip install '.[{extra}]'; or the wheel's file: pip install 'FILE.whl[{extra}]'"


def find_commit(root: Path = _HERE.parent) -> str:
    """Return the commit of a build from a clone, or of the clone at `root` that holds the package; empty if none.

    Args:
        root: the folder in which a clone has `.git`.
    """
    if (built_from := _HERE / _BUILT_FROM).is_file():
        return built_from.read_text().strip()
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=.dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=_GIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a clone of another user
        return ""
