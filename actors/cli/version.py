"""`raydix --version`, without the packages that a cache needs: they take seconds to import."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from raydix.schemas.version import package_version


def version_line() -> str:
    """Return the version, and the form of the core that a cache would run on here."""
    return f"raydix {package_version()} (core: {core_on_disk()})"


def core_on_disk() -> str:
    """Return "compiled" if all kernels are compiled from their present sources, and wanted; else "interpreted"."""
    if os.environ.get("RAYDIX_PLAIN", "0") not in ("", "0"):
        return "interpreted"
    package = find_spec("raydix.cache_core")
    assert package is not None and package.origin is not None, "it is installed with this module"
    kernels = Path(package.origin).parent / "kernels"
    try:
        hashes = json.loads((kernels / "compiled.json").read_text())  # setup.py wrote it
    except OSError:
        return "interpreted"
    return "compiled" if all(_is_of(kernels, name, wanted) for name, wanted in hashes.items()) else "interpreted"


def _is_of(kernels: Path, name: str, wanted: str) -> bool:
    """Return whether a module's source has this hash, and the compiled module is there."""
    has_compiled = any((kernels / f"{name}{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    return has_compiled and sha256((kernels / f"{name}.py").read_bytes()).hexdigest() == wanted
