"""The sources of the packages, for the tests that read them."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def source_files(*folders: str) -> list[Path]:
    """Return the Python files below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(source: str) -> ast.Module:
    """`ast.parse`, without a collection in its midst: CPython 3.11 then fails with a recursion depth that differs."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def where(path: Path) -> str:
    """Return a file's path below the root of the repository."""
    return str(path.relative_to(ROOT))
