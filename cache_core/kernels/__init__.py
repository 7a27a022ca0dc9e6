"""The inner loops of the core: Python modules, compiled by Cython if a C compiler was there at the installation.

Both forms give the same results; the compiled one takes less time. `RAYDIX_PLAIN=1` in the environment chooses the
sources. If a compiled module was built from another source than the present one, the sources run, with one warning.

Attributes:
    COMPILED: whether the compiled modules run.
    CORE: the same in a word.
"""

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

from raydix.cache_core.kernels.packed_slots import expand, is_row, join, pack_slots  # noqa: E402
from raydix.cache_core.kernels.page_lists import free_pages  # noqa: E402
from raydix.cache_core.kernels.page_memory import HashMemory, PageMemory  # noqa: E402
from raydix.cache_core.kernels.page_table import (  # noqa: E402
    END,
    NOTE,
    PENDING,
    PROMISED,
    REMOVE_END,
    STORE_END,
    STORED,
    PageTable,
)
from raydix.cache_core.kernels.tree import (  # noqa: E402
    Children,
    Key,
    LockAccounting,
    Node,
    RankedQueue,
    TwoRankedQueues,
    Victims,
    add_leaf,
    detach_leaf,
    gather,
    is_on_path,
    last_use,
    namespace_root,
    pack,
    rekey_children,
    split_node,
    walk,
    walk_and_split,
)

__all__ = [
    "COMPILED",
    "CORE",
    "Children",
    "END",
    "HashMemory",
    "Key",
    "LockAccounting",
    "NOTE",
    "Node",
    "PENDING",
    "PROMISED",
    "PageMemory",
    "PageTable",
    "REMOVE_END",
    "RankedQueue",
    "STORED",
    "STORE_END",
    "TwoRankedQueues",
    "Victims",
    "add_leaf",
    "detach_leaf",
    "expand",
    "free_pages",
    "gather",
    "is_on_path",
    "is_row",
    "join",
    "last_use",
    "namespace_root",
    "pack",
    "pack_slots",
    "rekey_children",
    "split_node",
    "walk",
    "walk_and_split",
]
