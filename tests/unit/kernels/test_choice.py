"""Which form of the kernels runs: compiled, or interpreted from the sources."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.more import more
from support.processes.fresh_process import run_fresh
from support.source_files import ROOT

from raydix.cache_core.kernels import CORE
from raydix.schemas.version import package_version

KERNELS = ROOT / "cache_core" / "kernels"
REPORT = """
import sys, warnings
sys.path.insert(0, {folder!r})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from raydix.cache_core import RadixCache, RadixKey, kernels
    from raydix.cache_core.kernels import tree
assert kernels.__file__.startswith({folder!r}), kernels.__file__
cache = RadixCache()
cache.insert(RadixKey([1, 2, 3]))
print(kernels.CORE, kernels.COMPILED, tree.__file__.endswith(".py"), cache.match_prefix(RadixKey([1, 2, 4])).prefix_len)
print(*(each.message for each in caught if "kernels" in str(each.message)), sep="\\n")
"""
TRAFFIC = """
import sys
sys.path.insert(0, {folder!r})
from support.traffic.radix import run_random_traffic
for page_size in (1, 4):
    run_random_traffic(0, page_size, num_operations=500)
"""


@pytest.fixture(scope="module")
def has_compiled() -> bool:
    """Skip the test unless all kernels were compiled from the present sources."""
    program = "from raydix.cache_core.kernels import COMPILED, tree\nprint(COMPILED, tree.__file__)"
    done = run_fresh(program, RAYDIX_PLAIN="0")
    if not done.stdout.startswith(f"True {KERNELS}"):  # `make test-asan` runs others
        pytest.skip("the kernels were not compiled: `make venv` with a C compiler")
    return True


@pytest.fixture
def copy_package(tmp_path: Path) -> Callable[[bool], Path]:
    """Copies the core, with its compiled modules or without; returns the folder of the copied kernels."""

    def copy(with_compiled: bool) -> Path:
        ignored = shutil.ignore_patterns("__pycache__", *([] if with_compiled else [f"*{EXTENSION_SUFFIXES[0]}"]))
        shutil.copytree(ROOT / "cache_core", tmp_path / "raydix" / "cache_core", ignore=ignored)
        return tmp_path / "raydix" / "cache_core" / "kernels"

    return copy


def run(program: str, folder: Path, plain: str = "0") -> CompletedProcess[str]:
    return run_fresh(program.format(folder=str(folder)), RAYDIX_PLAIN=plain)


def test_compiled_modules_run_unless_the_environment_asks_for_the_sources(
    has_compiled: bool, copy_package: Callable[[bool], Path], tmp_path: Path
) -> None:
    copy_package(True)

    for plain, expected in (
        ("0", "compiled True False 2"),
        ("", "compiled True False 2"),
        ("1", "interpreted False True 2"),
    ):
        done = run(REPORT, tmp_path, plain)
        assert done.stdout.split("\n") == [expected, "", ""], done.stderr


@pytest.mark.parametrize("name", ["page_lists", *more("tree", "packed_slots")])
def test_a_changed_source_runs_with_one_warning(
    has_compiled: bool, copy_package: Callable[[bool], Path], tmp_path: Path, name: str
) -> None:
    source = copy_package(True) / f"{name}.py"
    source.write_text(f"{source.read_text()}\n# changed\n")

    done = run(REPORT, tmp_path)

    result, warning, *others = done.stdout.splitlines()
    assert (result, others) == ("interpreted False True 2", []), done.stderr
    assert f"{name}.py runs instead, interpreted" in warning
    assert "run `make venv`, or `pip install -e .`, to compile them again" in warning


def test_without_compiled_modules_the_sources_run_without_a_warning(
    copy_package: Callable[[bool], Path], tmp_path: Path
) -> None:
    copy_package(False)

    done = run(REPORT, tmp_path)

    assert done.stdout.split("\n") == ["interpreted False True 2", "", ""], done.stderr


@pytest.mark.more
@pytest.mark.parametrize("plain", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_a_fault_planted_in_a_source_is_found(copy_package: Callable[[bool], Path], tmp_path: Path, plain: str) -> None:
    source = copy_package(plain == "1") / "tree.py"  # with the compiled modules, RAYDIX_PLAIN must pass them over
    assert run(TRAFFIC, tmp_path, plain).returncode == 0

    source.write_text(f"{source.read_text()}\n\ndef is_on_path(key, node, /):\n    return True\n")
    done = run(TRAFFIC, tmp_path, plain)

    assert done.returncode == 1
    assert "TrafficFailed: operation" in done.stderr


@pytest.mark.parametrize(("plain", "core"), [*more(("1", "interpreted")), ("", CORE)])
def test_the_command_and_the_stats_name_the_form(plain: str, core: str) -> None:
    program = (
        "import asyncio\n"
        "from raydix.actors import LocalPrefixCache\n"
        "from raydix.actors.cli.app import app\n"
        "from raydix.schemas import CacheConfig, PoolConfig\n"
        "cache = LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8, device='cpu')))\n"
        "print(asyncio.run(cache.stats()).core, flush=True)\n"
        "app(['--version'])"
    )

    done = run_fresh(program, **({"RAYDIX_PLAIN": plain} if plain else {}))

    assert done.stdout.split("\n")[:2] == [core, f"raydix {package_version()} (core: {core})"], done.stderr
