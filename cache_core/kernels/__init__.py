"""The inner loops of the core: compiled C if the installation built it, else plain Python.

Both return the same results; the compiled loops take less time. `RAYDIX_PLAIN=1` in the environment selects the plain
ones.
"""

from __future__ import annotations

import os
from typing import Literal

from raydix.cache_core.kernels.plain_kernels import *  # noqa: F403 -- the names in `__all__`

COMPILED = os.environ.get("RAYDIX_PLAIN", "0") in ("", "0")  # whether the compiled loops are in use

if COMPILED:
    try:
        from raydix.cache_core.kernels._compiled import *  # noqa: F403
    except ImportError:  # the installation had no compiler
        COMPILED = False

CORE: Literal["compiled", "interpreted"] = "compiled" if COMPILED else "interpreted"
