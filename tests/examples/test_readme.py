"""What the README shows runs as it stands there, and prints what it promises."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from ray.scripts.scripts import cli as ray_commands
from support.processes.command_line import run

from raydix.actors.cli.app import COMMANDS

README = Path(__file__).parents[2] / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.ray
def test_the_first_program_runs_and_hits_what_it_published(tmp_path: Path) -> None:
    program = tmp_path / "first.py"
    program.write_text(python_blocks()[0])

    environ = os.environ | {"RAY_ADDRESS": "local"}  # whatever cluster the user may have
    done = subprocess.run([sys.executable, program], cwd=tmp_path, env=environ, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "0 of 1000 tokens are there" in done.stdout
    assert "prefix_len=992" in done.stdout


@pytest.mark.ray
def test_the_commands_run_as_they_stand_there(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = README.read_text().partition("\n## The command\n")[2].partition("\n## ")[0]
    settings = re.search(r"\$ cat cache.yaml\n(.*?)\n\n", section, flags=re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^\$ raydix (.*)$", section, flags=re.MULTILINE)]
    (program,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert settings is not None
    (tmp_path / "cache.yaml").write_text(settings[1])
    monkeypatch.chdir(tmp_path)
    start, *others = lines
    assert start[0] == "start"

    run(*start)
    exec(compile(program, str(README), "exec"), {})
    printed = [run(*line, exit_code=3 if "chat-1" in line else 0) for line in others]
    run("stop", "chat-0", "--drain", 0.1)

    assert [line[0] for line in others] == ["stats", "tree", "stats"]
    assert "prefix_len=992" in capsys.readouterr().out
    assert "992 cached" in printed[0].stdout
    assert "1,000 requested" in printed[0].stdout
    assert "992 tokens, 0 hits" in printed[1].stdout
    assert printed[2].stderr in section


def test_the_walk_begins_with_a_clone_and_ends_the_cluster_that_it_starts() -> None:
    """What it does in between is run by tests/service/command/test_guides.py."""
    section = README.read_text().partition("\n## From nothing to a report\n")[2].partition("\n## ")[0]
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)).splitlines()
    commands = [each for line in lines for each in line.partition(" #")[0].split(" && ")]

    assert [" ".join(command.split()[:2]) for command in commands] == [
        "git clone",
        "cd raydix",
        "python3 -m",
        ". .venv/bin/activate",
        "pip install",
        "export RAY_AUTH_MODE=token",
        "ray get-auth-token",
        "ray start",
        "python settings.py",
        "raydix start",
        "python worker.py",
        "raydix stats",
        "raydix explain",
        "raydix report",
        "raydix stop",
        "ray stop",
    ]
    for _, name, *options in (command.split() for command in commands if command.startswith("ray ")):
        told = CliRunner().invoke(ray_commands, [name, "--help"]).output
        assert [each for each in options if each.startswith("--") and each not in told] == []


def test_every_command_named_exists() -> None:
    named = set(re.findall(r"(?:`|\$ )raydix ([a-z]+)", README.read_text()))

    assert {"start", "stats", "replay"} <= named
    assert named - COMMANDS.keys() == set()


def test_every_program_compiles() -> None:
    for block in python_blocks():
        compile(block, str(README), "exec")


def test_every_make_target_named_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))

    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(), flags=re.MULTILINE)) <= targets


def test_every_file_named_exists() -> None:
    named = re.findall(r"`((?:tests|examples|actors|cache_core|schemas)/[\w/.]*)`", README.read_text())

    assert named
    assert [name for name in named if not (README.parent / name).exists()] == []
