"""The files of `make dist`, each installed into an environment outside the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.documents import ROOT, blocks, commands
from support.processes.ray_head import ray_head

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
FOR_THE_SHELL = ("git", "cd", "python3", ".", "pip", "export", "ray")  # the test does the same in other words

pytestmark = [
    pytest.mark.more,
    pytest.mark.packaging,
    pytest.mark.ray,  # one of them starts a cluster
    pytest.mark.timeout(1800),  # compiling takes a minute, and installing torch and Ray others
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: install it"),
]


class Files(NamedTuple):
    """The files of a release, and its source, unpacked."""

    sdist: Path
    compiled: Path
    pure: Path
    source: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Run `make dist` into a folder outside the repository, with the packages that this process has."""
    pytest.importorskip("auditwheel", reason="needs the packages of the extra test: make -B venv")
    folder = tmp_path_factory.mktemp("dist")
    paths = [f"DIST={folder / 'dist'}", f"DIST_BUILD={folder / 'build'}", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(
        ["make", "dist", *paths, "--assume-old", ".venv/.installed"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "RAYDIX"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    (sdist,), (compiled,), (pure,) = (
        (folder / "dist").glob(pattern) for pattern in ("*.tar.gz", "*.whl", "pure/*.whl")
    )
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return Files(sdist, compiled, pure, folder / f"raydix-{VERSION}")


def modules_in(wheel: Path) -> set[str]:
    """The compiled modules of a wheel, without their suffixes."""
    return {Path(name).name.partition(".")[0] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}


def test_the_wheels_have_the_names_of_their_platforms(files: Files) -> None:
    kernels = {path.stem for path in (ROOT / "cache_core" / "kernels").glob("[!_]*.py")}
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", files.compiled], capture_output=True, text=True
    ).stdout
    (tag,) = re.findall(r'consistent with\s+the following platform tag:\s+"(manylinux_\w+)"', shown)

    assert files.sdist.name == f"raydix-{VERSION}.tar.gz"
    assert files.pure.name == f"raydix-{VERSION}-py3-none-any.whl"
    name, platforms = files.compiled.stem.rsplit("-", 1)
    assert name == f"raydix-{VERSION}-{PYTHON}-{PYTHON}"
    assert tag in platforms.split(".")
    assert (modules_in(files.compiled), modules_in(files.pure)) == (kernels, set())


def environ_of(environment: Path, **more: str) -> dict[str, str]:
    """The variables of a shell in which an environment is active, without those of this process's own."""
    ours = ("PYTHON", "PYTEST", "RAYDIX", "RAY_", "COVERAGE", "VIRTUAL_ENV")
    shell = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return shell | {"PATH": f"{environment / 'bin'}:{shell['PATH']}"} | more


def run_in(environment: Path, folder: Path, *command: str, **more: str) -> str:
    """Run a command of an environment in a folder; return its output."""
    done = subprocess.run(
        command, cwd=folder, env=environ_of(environment, **more), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize(("file", "core"), [("compiled", "compiled"), ("pure", "interpreted"), ("sdist", "compiled")])
def test_each_file_is_installed_and_serves_a_worker_in_its_process(
    files: Files, tmp_path: Path, file: str, core: str
) -> None:
    """The environment borrows the dependencies of this one, so that no index is asked."""
    environment, folder = tmp_path / "environment", tmp_path / "elsewhere"
    folder.mkdir()
    venv.create(environment, symlinks=True)
    (installed,) = environment.glob("lib/python*/site-packages")
    (installed / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--force-reinstall", "--no-deps"]
    run_in(environment, folder, *pip, "--no-index", "--no-build-isolation", str(getattr(files, file)))

    program = next(block.text for block in blocks(files.source / "examples/worker.md") if block.language == "python")
    found = run_in(environment, folder, str(python), "-c", "import raydix; print(raydix.__file__)")

    assert Path(found.strip()).is_relative_to(installed)
    version = run_in(environment, folder, "raydix", "--version")
    assert re.fullmatch(rf"raydix {re.escape(VERSION)}(\+\S+)? \(core: {core}\)\n", version)
    assert "french: 32 of 40" in run_in(environment, folder, str(python), "-c", program)


@pytest.fixture(scope="module")
def strangers_environment(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the compiled wheel, and dependencies from the package index."""
    environment = tmp_path_factory.mktemp("stranger") / "environment"
    venv.create(environment, symlinks=True, with_pip=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "-c", str(files.source / "constraints.txt")]
    done = subprocess.run(
        [*pip, f"{files.compiled}[transformers]"],
        cwd=environment.parent,
        env=environ_of(environment),
        capture_output=True,
        text=True,
    )
    if "No matching distribution found" in done.stderr or "Connection" in done.stderr:
        pytest.skip("needs a package index: pip install ray torch transformers")
    assert done.returncode == 0, done.stderr
    return environment


@pytest.fixture
def cluster(strangers_environment: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster of the stranger's, with a token; the variables that reach it."""
    home = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    run_in(strangers_environment, tmp_path, "ray", "get-auth-token", "--generate", **home)
    environ = environ_of(strangers_environment, **home)
    with ray_head(strangers_environment / "bin" / "python", num_cpus=2, environ=environ) as address:
        yield home | {"RAY_ADDRESS": address}


def test_a_stranger_with_the_wheel_gets_a_cache_a_worker_and_a_report(
    files: Files, strangers_environment: Path, cluster: dict[str, str], tmp_path: Path
) -> None:
    """The walk of examples/commands.md, word for word, from the files of the release alone."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    printed = []

    guide = files.source / "examples" / "commands.md"
    walk = guide.read_text().partition("\n## A cache in a shell\n")[0]
    (tmp_path / "walk.md").write_text(walk)
    for prose, language, text in blocks(tmp_path / "walk.md"):
        if language == "python":
            (folder / re.findall(r"`(\w+\.py)`", prose)[-1]).write_text(text)
        for line in commands(text) if language == "sh" else []:
            word, *arguments = line.removeprefix("RAY_worker_niceness=0 ").split()
            if word not in FOR_THE_SHELL:
                printed.append(run_in(strangers_environment, folder, word, *arguments, **cluster))

    output = "\n".join(printed)
    assert "0 of 100 tokens were cached" in output
    assert "96 of 100 tokens were cached" in output
    assert "48 of 100 tokens hit" in output
    page = (folder / "report.html").read_text()
    assert "kv-0" in page and "</html>" in page
    assert "no cache" in run_in(strangers_environment, folder, "raydix", "list", **cluster).lower()
