"""Guides keep their word: their programs and commands run on a real cluster, in order, as they stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.sample_trace import write_trace
from support.processes.command_line import run

from raydix.actors.cli.app import COMMANDS

ROOT = Path(__file__).parents[3]
GUIDES = sorted((ROOT / "examples").glob("*.md"))
NOT_RUN = {  # first word of a command, and why no test runs it
    "git": "the tests run in a clone",
    "make": "tests/examples/test_readme.py looks whether there is such a target",
    "python3": "the tests have a virtual environment",
    ".": "they run in it",
    "pip": "it changes the environment",
    "export": "it is for the user's cluster",
    "ray": "the tests have a cluster of their own",
}
PRINTED = {  # what a guide's comments promise of its output
    "worker.md": [
        "french: 0 of 40",
        "french: 32 of 40",
        "latin: 0 of 40",
        "\n64\n",
        "1\n1\n2\n0\nlora_id 'policy' may have another model by now\nTrue\n",
        "8 requests finished, preemptions > 0 = True",
        "\n64\n",
        "the worker holds 3 slots\nTrue\nLeaseExpired\n64\n",
    ],
    "size.md": ["2048 bytes a token, 128 MiB"],
    "deploy.md": ["True\n"],
    "README.md": ["0 of 100 tokens", "96 of 100 tokens", "what follows was never stored"],
}


def blocks(text: str) -> list[tuple[str, str, str]]:
    """The prose before each block, its language and its text, in order."""
    return re.findall(r"(.*?)^```(python|sh|yaml)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def walk_of_the_readme() -> str:
    """Its section for a new user; the first program of all is run by tests/examples/test_readme.py."""
    sections = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (walk,) = [each for each in sections if each.startswith("From nothing to a report")]
    return walk


@pytest.fixture
def workplace(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a trace, and no cache left behind."""
    write_trace(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    run("stop", "--all")


def perform(prose: str, language: str, text: str, output: list[str]) -> None:
    """Do what a block says. A program whose file the prose names waits in that file for its `python FILE`."""
    if language == "yaml":
        (name,) = re.findall(r"^# (\S+)$", text, flags=re.MULTILINE)
        Path(name).write_text(text)
    elif language == "python":
        if names := re.findall(r"`(\w+\.py)`", prose):
            Path(names[-1]).write_text(text)
        else:
            execute(text)
    else:
        for words in filter(None, (shlex.split(line, comments=True) for line in text.splitlines())):
            if words[0] == "python":
                execute(Path(words[1]).read_text())
                Path(words[1]).unlink()
            elif words[0] not in NOT_RUN:
                assert words[0] == "raydix", words
                output.append(run(*words[1:]).stdout)


def execute(program: str) -> None:
    exec(compile(program, "guide", "exec"), {"__name__": "__main__"})  # so that Ray sends its classes by value


@pytest.mark.ray
@pytest.mark.parametrize("name", ["README.md", *(guide.name for guide in GUIDES)])
def test_every_block_of_a_guide_runs(name: str, workplace: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = walk_of_the_readme() if name == "README.md" else (ROOT / "examples" / name).read_text()
    output: list[str] = []

    for block in blocks(text):
        perform(*block, output)
        output.append(capsys.readouterr().out)

    assert not list(Path().glob("*.py")), "no command of the guide runs it"
    printed = "\n".join(output)
    for promised in PRINTED.get(name, []):
        assert promised in printed, printed


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_a_guide_names_the_extra_of_an_option_that_needs_one_before_it(guide: Path) -> None:
    before, option, _ = guide.read_text().partition(" --plot ")
    assert not option or re.search(r"pip install .*\[.*plot.*\]", before)


@pytest.mark.parametrize("path", [ROOT / "README.md", *GUIDES], ids=lambda path: path.name)
def test_every_command_named_in_passing_exists(path: Path) -> None:
    for command, options in re.findall(r"`raydix ([a-z]+)([^`]*)`", path.read_text()):
        assert command in COMMANDS
        told = run(command, "--help").stdout
        assert [each for each in re.findall(r"--[a-z-]+", options) if each not in told] == []


def test_every_guide_is_named_in_the_readme_and_links_to_what_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    for guide in GUIDES:
        assert f"examples/{guide.name}" in readme
        for target in re.findall(r"\]\(([\w./-]+)\)", guide.read_text()):
            assert (guide.parent / target).exists(), target
