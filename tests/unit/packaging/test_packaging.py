"""A wheel holds our three packages under one name, and works next to a user's own `schemas` and `actors`."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("actors", "cache_core", "schemas")


def setuptools_is_new_enough() -> bool:
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(version.partition(".")[0]) >= 77


pytestmark = [
    pytest.mark.packaging,
    pytest.mark.skipif(not setuptools_is_new_enough(), reason="needs setuptools>=77 here: no download"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree."""
    return build(tmp_path_factory.mktemp("packaging"))


def build(folder: Path, **environ: str) -> Path:
    """Build a wheel from a copy, so that no build files are left in the working tree."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))

    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=source,
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_every_source_is_compiled() -> None:
    (extension,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    core = ROOT / "cache_core" / "kernels" / "c"

    assert extension["sources"] == sorted(path.relative_to(ROOT).as_posix() for path in core.glob("*.c"))
    assert extension["depends"] == sorted(path.relative_to(ROOT).as_posix() for path in core.glob("*.h"))


def test_the_wheel_holds_exactly_our_packages_with_their_types_and_data(wheel: Path) -> None:
    expected = {
        f"raydix/{path.relative_to(ROOT).as_posix()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".json") or path.name == "py.typed"
    }
    assert {f"raydix/{package}/py.typed" for package in PACKAGES} <= expected

    names = set(zipfile.ZipFile(wheel).namelist())

    compiled = {name for name in names if name.endswith(".so")}
    assert {name for name in names if ".dist-info/" not in name} - compiled == expected
    assert all(name.startswith("raydix/cache_core/kernels/_compiled.") for name in compiled)
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_wheel_works_beside_a_users_own_packages_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    installed, project = tmp_path / "installed", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(installed)
    for package in PACKAGES:
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("OWNER = 'the user'\n")
    program = "\n".join(
        f"import {package}, raydix.{package}\n"
        f"assert {package}.OWNER == 'the user', {package}.__file__\n"
        f"print(raydix.{package}.__file__)"
        for package in PACKAGES
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "raydix" / name / "__init__.py") for name in PACKAGES]


def test_without_a_compiler_the_wheel_has_the_plain_kernels_alone(tmp_path: Path) -> None:
    built = build(tmp_path, CC="there-is-no-compiler", LDSHARED="there-is-no-compiler")
    zipfile.ZipFile(built).extractall(tmp_path / "installed")
    program = (
        "import sys\n"  # an editable installation would lend it the compiled ones of the working tree
        "sys.meta_path = [each for each in sys.meta_path if '__editable__' not in getattr(each, '__module__', '')]\n"
        "from raydix.cache_core import RadixCache, kernels\n"
        "print(kernels.COMPILED)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )

    assert done.stdout.split() == ["False"], done.stderr
