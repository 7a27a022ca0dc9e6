"""A wheel holds our three packages under one name, and works next to a user's own `schemas` and `actors`."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("actors", "cache_core", "schemas")
ROOT_PACKAGE = ".raydix"  # the folder of the package `raydix` itself
KERNELS = "raydix/cache_core/kernels/"
WARNING = "the core will be interpreted"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
ADDRESS = "https://git.example/team/raydix"


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
    """A wheel of the working tree, built where no compiler is."""
    folder = tmp_path_factory.mktemp("packaging")
    wheel, printed = build(folder, "wheel", CC="there-is-no-compiler", LDSHARED="there-is-no-compiler")
    assert WARNING in printed
    return wheel


def build(folder: Path, kind: str, *, clone: bool = False, **environ: str) -> tuple[Path, str]:
    """Build a "wheel" or an "sdist" from a copy, or a clone of one, so that the working tree gets no build files.

    Return it, and the text that setuptools printed.
    """
    source = folder / "source"
    source.mkdir()
    for path in (ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "LICENSE", *documents()):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    copy_packages(source)
    if clone:
        for arguments in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "one"],
        ):
            subprocess.run(["git", *arguments], cwd=source, check=True)

    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        env=os.environ | {"RAYDIX_PLAIN": "", "RAYDIX_URL": ""} | environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1], done.stdout + done.stderr


def documents() -> list[Path]:
    """The files for readers and the constraints, which a source distribution has besides the packages."""
    examples = [path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [*ROOT.glob("*.md"), *ROOT.glob("constraints*.txt"), *examples]


def copy_packages(folder: Path) -> None:
    for name in (ROOT_PACKAGE, *PACKAGES):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))


def our_files() -> set[str]:
    """The paths below the root that an installation needs."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in (ROOT_PACKAGE, *PACKAGES)
        for path in (ROOT / package).rglob("*")
        if (path.suffix in (".py", ".pyi", ".html", ".json", ".yml") or path.name == "py.typed")
        and path.name != "compiled.json"
    }


def compiled_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}


def test_the_wheel_holds_exactly_our_packages_with_their_types_and_data(wheel: Path) -> None:
    expected = {f"raydix/{name}".replace(f"/{ROOT_PACKAGE}/", "/") for name in our_files()}
    assert {"raydix/py.typed", *(f"raydix/{package}/py.typed" for package in PACKAGES)} <= expected

    names = set(zipfile.ZipFile(wheel).namelist())

    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("/LICENSE") for name in names)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: install it")
@pytest.mark.long
def test_with_a_compiler_the_wheel_holds_the_compiled_kernels_too(tmp_path: Path, wheel: Path) -> None:
    modules = {path.stem for path in (ROOT / "cache_core" / "kernels").glob("[!_]*.py")}

    built, printed = build(tmp_path, "wheel")

    compiled = compiled_in(built)
    assert WARNING not in printed
    assert all(name.startswith(KERNELS) for name in compiled)
    assert {Path(name).name.partition(".")[0] for name in compiled} == modules
    hashes = {f"{KERNELS}compiled.json"}  # of the compiled sources
    assert set(zipfile.ZipFile(built).namelist()) - compiled - hashes == set(zipfile.ZipFile(wheel).namelist())


def test_a_source_distribution_holds_what_builds_and_readers_need_and_nothing_of_an_earlier_build(
    tmp_path: Path,
) -> None:
    sdist, _ = build(tmp_path, "sdist", RAYDIX_URL=f"{ADDRESS}/")

    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        metadata = archive.extractfile(f"raydix-{VERSION}/PKG-INFO").read().decode()

    ours = {*our_files(), *(path.relative_to(ROOT).as_posix() for path in documents())}
    assert {*ours, "pyproject.toml", "setup.py", "LICENSE", "CHANGELOG.md", "constraints.txt"} <= names
    leftovers = (".c", ".so", ".pyc", "compiled.json")
    assert [name for name in names if name.endswith(leftovers) or name.startswith("build/")] == []

    # With an address, each link of the description and of the project leads to a file of the distribution.
    targets = [*links_in(metadata), *re.findall(r"^Project-URL: \w+, (.*)$", metadata, flags=re.MULTILINE)]
    ours = [target.partition("#")[0] for target in targets if target.startswith(ADDRESS)]
    assert [target for target in targets if "://" not in target] == []
    assert "CHANGELOG.md" in (files := {target.partition(f"/v{VERSION}/")[2] for target in ours})
    folders = {parent.as_posix() for name in names for parent in Path(name).parents}
    assert {name.rstrip("/") for name in files} - names - folders == {""}  # the repository itself, and its issues
    assert {target for target in ours if f"/v{VERSION}/" not in target} == {ADDRESS, f"{ADDRESS}/issues"}


def links_in(text: str, form: str = r"\]\(([^)\s]+)\)") -> list[str]:
    """The targets of the links and pictures in a description."""
    return re.findall(form, re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def test_without_an_address_the_description_names_files_of_the_source_distribution(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"raydix-{VERSION}.dist-info/METADATA").decode()
    linked = links_in((ROOT / "README.md").read_text(), form=r"(?<!!)\[[^\[\]]*\]\(([^)#\s]+)")
    paths = {target for target in linked if "://" not in target}

    assert "examples/commands.md" in paths
    assert [path for path in paths if f"`{path}`" not in metadata] == []
    published = {published for file in documents() for published in (file, *file.parents)}
    assert [path for path in paths if ROOT / path not in published] == []
    assert [target for target in links_in(metadata) if "://" not in target] == []
    assert "![" not in metadata and "Project-URL" not in metadata


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


@pytest.mark.parametrize("started_in", [".", "raydix"])
def test_a_program_in_a_clone_or_its_parent_folder_imports_the_installed_package(
    wheel: Path, tmp_path: Path, started_in: str
) -> None:
    installed, clone = tmp_path / "installed", tmp_path / "projects" / "raydix"
    zipfile.ZipFile(wheel).extractall(installed)
    clone.mkdir(parents=True)
    copy_packages(clone)
    program = (
        "import raydix, raydix.actors, raydix.schemas as s; print(raydix.__file__, s.__file__, raydix.__version__)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=clone.parent / started_in,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    root, schemas, version = done.stdout.split()
    assert (root, schemas) == tuple(str(installed / "raydix" / name) for name in ("__init__.py", "schemas/__init__.py"))
    assert version == VERSION  # a wheel from no clone names no commit


def test_a_wheel_from_a_clone_names_its_commit(tmp_path: Path) -> None:
    built, _ = build(tmp_path, "wheel", clone=True, CC="there-is-no-compiler", LDSHARED="there-is-no-compiler")

    commit = zipfile.ZipFile(built).read("raydix/schemas/commit.txt").decode().strip()

    assert (
        commit
        == subprocess.check_output(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=tmp_path / "source", text=True
        ).strip()
    )


def test_without_a_compiler_the_kernels_are_interpreted(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
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


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: install it")
@pytest.mark.long
def test_if_one_module_cannot_be_compiled_none_is(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *page_lists.c*) exit 1;; esac\nexec gcc "$@" -O0\n')
    compiler.chmod(0o755)

    built, printed = build(tmp_path, "wheel", CC=str(compiler), LDSHARED="gcc -shared")

    assert WARNING in printed
    assert compiled_in(built) == set()
