"""The inner loops of the core: compiled if they were built where the package was installed, else in plain Python.

Both give the same; the compiled ones take less time. `RAYDIX_PLAIN=1` in the environment chooses the plain ones.
"""

from __future__ import annotations

import os
from typing import Literal

from raydix.cache_core.kernels.plain_kernels import *  # noqa: F403 -- `__all__` says what they are

COMPILED = os.environ.get("RAYDIX_PLAIN", "0") in ("", "0")  # whether the compiled ones are in use

if COMPILED:
    try:
        from raydix.cache_core.kernels._compiled import *  # noqa: F403
    except ImportError:  # there was no compiler where it was installed
        COMPILED = False

CORE: Literal["compiled", "interpreted"] = "compiled" if COMPILED else "interpreted"
