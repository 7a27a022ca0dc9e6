"""The allowed imports: the arrows that keep the core synchronous, small and embeddable."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_files import ROOT, parse, source_files, where

PACKAGES = ("actors", "cache_core", "schemas")

STDLIB = frozenset(sys.stdlib_module_names)
MAY_IMPORT = {
    # pydantic_core is pydantic's own compiled half: a type with a schema of its own takes it from there
    "schemas": STDLIB | {"numpy", "pydantic", "pydantic_core", "raydix.schemas"},
    "cache_core": (STDLIB - {"asyncio"}) | {"cython", "numpy", "torch", "raydix.cache_core"},
}


def imported_names(source: str, package: str = "") -> Iterator[str]:
    """Every dotted name that `source` imports, in functions and under TYPE_CHECKING too.

    `from a import b` gives "a.b" (b may be a module); relative imports are resolved against
    `package`; `import_module("a.b")` and `__import__("a.b")` count where the name is literal.
    """
    for node in ast.walk(parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".")
                parents = parts[: len(parts) - level + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def owner(name: str) -> str:
    """The unit that the arrows speak of: "raydix.schemas" for our own packages, else the top name."""
    top, _, rest = name.partition(".")
    return f"raydix.{rest.partition('.')[0]}" if top == "raydix" else top


def imports_of(path: Path) -> set[str]:
    package = ".".join(["raydix", *path.relative_to(ROOT).parent.parts])
    return {owner(name) for name in imported_names(path.read_text(encoding="utf-8"), package)}


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_a_lower_package_imports_only_what_its_row_allows(folder: str) -> None:
    files = source_files(folder)
    assert files, f"no sources in {folder}"

    offences = {where(path): sorted(imports_of(path) - MAY_IMPORT[folder]) for path in files}

    assert {path: names for path, names in offences.items() if names} == {}


def test_only_actors_examples_and_tests_import_the_actors() -> None:
    offences = [where(path) for path in source_files("schemas", "cache_core") if "raydix.actors" in imports_of(path)]

    assert offences == []


def test_no_package_imports_examples_or_tests() -> None:
    offences = [where(path) for path in source_files(*PACKAGES) if imports_of(path) & {"examples", "tests"}]

    assert offences == []


def test_nobody_imports_a_package_by_its_bare_folder_name() -> None:
    offences = {
        where(path): sorted(imports_of(path) & set(PACKAGES)) for path in source_files(*PACKAGES, "examples", "tests")
    }

    assert {path: names for path, names in offences.items() if names} == {}


# From the ground up. A folder imports only folders above it in its list.
FOLDERS = {
    "cache_core": ["kernels", "tree", "eviction", "pool", "components", "radix", "leases", "tiers", "rows"],
    "actors": [
        "loop",
        "metrics",
        "observe",
        "transport",
        "memory",
        "tiers",
        "sessions",
        "service",
        "cluster",
        "client",
        "fleet",
        "engines",
        "serve",
        "exporters",
        "huggingface",
        "demo",
        "replay",
        "report",
        "cli",
    ],
}


def rooms_imported_by_rooms(package: str) -> dict[str, set[str]]:
    """For each folder and top-level module of a package, those that it imports."""
    paths = [path for path in source_files(package) if path != ROOT / package / "__init__.py"]
    imports: dict[str, set[str]] = {room_of(path, package): set() for path in paths}
    for path in paths:
        for name in imported_names(path.read_text(encoding="utf-8")):  # relative imports are banned
            parts = name.split(".")
            if parts[:2] == ["raydix", package] and len(parts) > 2 and parts[2] in imports:
                imports[room_of(path, package)].add(parts[2])
    return {room: imported - {room} for room, imported in imports.items()}


def room_of(path: Path, package: str) -> str:
    return path.relative_to(ROOT / package).parts[0].removesuffix(".py")


def all_below(room: str, imports: dict[str, set[str]]) -> set[str]:
    """The rooms that a room imports, directly or by others."""
    below: set[str] = set()
    following = [room]
    while following:
        new = imports[following.pop()] - below
        below |= new
        following += new
    return below


@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_folders_import_in_their_order(package: str) -> None:
    imports, order = rooms_imported_by_rooms(package), FOLDERS[package]
    assert set(order) <= set(imports)

    offences = [
        f"{room} -> {imported}"
        for place, room in enumerate(order)
        for imported in imports[room]
        if imported in order[place:]
    ]

    assert offences == []


def test_the_actors_lie_in_few_folders_all_of_them_in_the_order() -> None:
    rooms = {room_of(path, "actors") for path in source_files("actors")}

    assert rooms - set(FOLDERS["actors"]) == {"__init__"}
    assert len(FOLDERS["actors"]) == 19


@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_no_folder_or_module_imports_itself_by_way_of_others(package: str) -> None:
    imports = rooms_imported_by_rooms(package)

    assert [room for room in imports if room in all_below(room, imports)] == []


@pytest.mark.parametrize("lower", ["sessions", "observe"])
def test_sessions_and_observers_know_nothing_of_the_service(lower: str) -> None:
    assert rooms_imported_by_rooms("actors")[lower] & {"service", "client"} == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ray", {"ray"}),
        ("import numpy as np, torch.nn", {"numpy", "torch"}),
        ("from ray.util import queue", {"ray"}),
        ("def f():\n    import asyncio.events", {"asyncio"}),
        ("if TYPE_CHECKING:\n    from torch import Tensor", {"torch"}),
        ("import raydix.actors.client.prefix_cache_client", {"raydix.actors"}),
        ("from raydix import actors", {"raydix.actors"}),
        ("from raydix.actors import connect", {"raydix.actors"}),
        ("from .config import PoolConfig", {"raydix.cache_core"}),
        ("from ..actors import connect", {"raydix.actors"}),
        ("from .. import actors", {"raydix.actors"}),
        ("importlib.import_module('ray')", {"ray"}),
        ("__import__('schemas')", {"schemas"}),
    ],
)
def test_a_forbidden_import_is_seen_in_whatever_form_it_is_written(source: str, expected: set[str]) -> None:
    assert {owner(name) for name in imported_names(source, "raydix.cache_core")} == expected


def modules_loaded_by(program: str, cwd: Path) -> set[str]:
    """Top-level names in `sys.modules` after a fresh interpreter ran `program` in `cwd`."""
    report = "\nimport sys\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program + report], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_actors_loads_no_torch(tmp_path: Path) -> None:
    loaded = modules_loaded_by("import raydix.actors", tmp_path)

    assert "raydix" in loaded
    assert "torch" not in loaded


def test_the_help_of_the_command_waits_for_neither_torch_nor_ray(tmp_path: Path) -> None:
    program = "from raydix.actors.cli.app import app\napp(['--help'], standalone_mode=False)"

    loaded = modules_loaded_by(program, tmp_path)

    assert "typer" in loaded
    assert loaded & {"torch", "ray"} == set()


def test_a_local_cache_loads_no_ray(tmp_path: Path) -> None:
    program = (
        "from raydix.actors import LocalPrefixCache\n"
        "from raydix.schemas import CacheConfig, PoolConfig\n"
        "LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=64)))"
    )

    loaded = modules_loaded_by(program, tmp_path)

    assert "raydix" in loaded
    assert "ray" not in loaded
