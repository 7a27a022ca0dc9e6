"""`lazy_names`: a package imports each of its modules when a name of it is first used."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, from the imports that its source has for typing.

    Each public name is one indented line `from module import name as name`, which type checkers read as well.
    """
    module: Any = sys.modules[package]
    imports = re.findall(r"^    from (\S+) import (\w+) as \2$", module.__loader__.get_source(package), re.MULTILINE)
    home_of = {name: home for home, name in imports}
    names = sorted(home_of)

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(module, name, value)  # found without this function the next time
        return value

    return names, find, lambda: names
