"""The inner loops of the core: Python modules, compiled by Cython if a C compiler was there at the installation.

Both forms give the same results; the compiled one takes less time. `RAYDIX_PLAIN=1` in the environment chooses the
sources. If a compiled module was built from another source than the present one, the sources run, with one warning.

Attributes:
    COMPILED: whether the compiled modules run.
    CORE: the same in a word.
"""

# ruff: noqa: E402 -- what precedes the imports of the modules decides in which form they are imported

from __future__ import annotations

import os
import sys
from hashlib import sha256
from importlib import import_module
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from typing import Literal
from warnings import warn

_FOLDER = Path(__file__).parent
_MODULES = ("packed_slots", "page_lists", "page_memory", "page_table", "tree")


def _is_compiled() -> bool:
    """Return whether all modules are compiled, from the sources beside them."""
    for name in _MODULES:
        module = import_module(f"{__name__}.{name}")
        if Path(str(module.__file__)).suffix == ".py":
            return False
        if module.SOURCE_HASH != sha256((_FOLDER / f"{name}.py").read_bytes()).hexdigest():
            warn(
                f"{module.__file__} was compiled from another source: {name}.py runs instead, interpreted; "
                "run `make venv`, or `pip install -e .`, to compile them again",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
    return True


COMPILED = os.environ.get("RAYDIX_PLAIN", "0") in ("", "0") and _is_compiled()
CORE: Literal["compiled", "interpreted"] = "compiled" if COMPILED else "interpreted"

if not COMPILED:  # An import from this folder must find sources alone.
    for _name in _MODULES:
        sys.modules.pop(f"{__name__}.{_name}", None)
    sys.path_importer_cache[str(_FOLDER)] = FileFinder(str(_FOLDER), (SourceFileLoader, SOURCE_SUFFIXES))

from raydix.cache_core.kernels.packed_slots import expand as expand
from raydix.cache_core.kernels.packed_slots import is_row as is_row
from raydix.cache_core.kernels.packed_slots import join as join
from raydix.cache_core.kernels.packed_slots import pack_slots as pack_slots
from raydix.cache_core.kernels.page_lists import free_pages as free_pages
from raydix.cache_core.kernels.page_memory import HashMemory as HashMemory
from raydix.cache_core.kernels.page_memory import PageMemory as PageMemory
from raydix.cache_core.kernels.page_table import END as END
from raydix.cache_core.kernels.page_table import NOTE as NOTE
from raydix.cache_core.kernels.page_table import PENDING as PENDING
from raydix.cache_core.kernels.page_table import PROMISED as PROMISED
from raydix.cache_core.kernels.page_table import REMOVE_END as REMOVE_END
from raydix.cache_core.kernels.page_table import STORE_END as STORE_END
from raydix.cache_core.kernels.page_table import STORED as STORED
from raydix.cache_core.kernels.page_table import PageTable as PageTable
from raydix.cache_core.kernels.tree import Children as Children
from raydix.cache_core.kernels.tree import Key as Key
from raydix.cache_core.kernels.tree import LockAccounting as LockAccounting
from raydix.cache_core.kernels.tree import Node as Node
from raydix.cache_core.kernels.tree import RankedQueue as RankedQueue
from raydix.cache_core.kernels.tree import TwoRankedQueues as TwoRankedQueues
from raydix.cache_core.kernels.tree import Victims as Victims
from raydix.cache_core.kernels.tree import add_leaf as add_leaf
from raydix.cache_core.kernels.tree import detach_leaf as detach_leaf
from raydix.cache_core.kernels.tree import gather as gather
from raydix.cache_core.kernels.tree import is_on_path as is_on_path
from raydix.cache_core.kernels.tree import last_use as last_use
from raydix.cache_core.kernels.tree import namespace_root as namespace_root
from raydix.cache_core.kernels.tree import pack as pack
from raydix.cache_core.kernels.tree import rekey_children as rekey_children
from raydix.cache_core.kernels.tree import split_node as split_node
from raydix.cache_core.kernels.tree import walk as walk
from raydix.cache_core.kernels.tree import walk_and_split as walk_and_split
