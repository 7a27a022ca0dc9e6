"""The programs and commands of README and guides run on a real cluster, in order, as printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from re import findall

import pytest
from support.documents import GUIDES, RUN, Block, blocks, seen_by_git, transcript
from support.models.sample_trace import write_trace
from support.more import more
from support.processes.command_line import run

NOT_RUN = {  # first word of a command, and the reason why no test runs it
    "git": "the tests run in a clone",
    "make": "tests/examples/test_documents.py checks that the target exists",
    "python3": "the tests have a virtual environment",
    ".": "they run in it",
    "pip": "it changes the environment",
    "export": "it is for the user's cluster",
    "ray": "the tests have a cluster of their own",
}
WITH_ENGINES = {"engines.md"}  # tests/engines/test_vllm_app.py runs their commands
RUN_ELSEWHERE = {  # guide and section, and the tests that run its programs and commands
    ("fleet.md", "Ray Serve"): "tests/examples/test_serve_app.py; with vLLM: tests/engines",
    ("fleet.md", "Feed other indexers"): "tests/service/exporters",
}
WITH_BLOCKS = [
    path for path in GUIDES if path.name not in WITH_ENGINES and any(block.language in RUN for block in blocks(path))
]
SLOW = {"commands.md", "deploy.md"}  # a quarter of a minute
NO_SUCH_CACHE = 3  # exit status
PRINTED = {  # the output that a guide's comments promise
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
    "fleet.md": ["960 tokens are at chat-", "1,000 tokens; cost = pending + 3 * uncached", "round_robin"],
    "size.md": ["2048 bytes a token, 128 MiB"],
    "deploy.md": ["True\n"],
    "commands.md": [
        "0 of 100 tokens were cached",
        "96 of 100 tokens were cached",
        "48 of 100 tokens hit",
        "prefix_len=992",
        "992 cached",
        "1,000 requested",
        "992 tokens, 0 hits",
    ],
}


@pytest.fixture
def workplace(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a folder with a trace, and check that no cache is left."""
    write_trace(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    run("stop", "--all")


def perform(block: Block, output: list[str]) -> None:
    """Run a block. A program is saved if the prose names its file, for its `python FILE`."""
    if block.language == "yaml":
        (name,) = findall(r"(?m)^# (\S+)$", block.text)
        Path(name).write_text(block.text)
    elif block.language == "console":
        for command, shown in transcript(block.text):
            type_in(command, shown, output)
    elif block.language == "sh":
        for line in block.text.splitlines():
            type_in(line, "", output)
    elif names := findall(r"`(\w+\.py)`", block.prose):
        Path(names[-1]).write_text(block.text)
    else:
        execute(block.text)


def type_in(line: str, shown: str, output: list[str]) -> None:
    """Run a line of a shell. An error shown in the guide must be printed word for word."""
    match shlex.split(line, comments=True):
        case ["cat", name]:
            Path(name).write_text(shown)
        case ["python", name]:
            execute(Path(name).read_text())
            Path(name).unlink()
        case ["raydix", *arguments]:
            refused = shown.startswith("error:")
            done = run(*arguments, exit_code=NO_SUCH_CACHE if refused else 0)
            output.append(done.stdout)
            assert not refused or done.stderr.strip() == shown
        case [word, *_]:
            assert word in NOT_RUN, line


def execute(program: str) -> None:
    exec(compile(program, "guide", "exec"), {"__name__": "__main__"})  # so that Ray sends its classes by value


@pytest.mark.ray
@pytest.mark.parametrize(
    "path",
    [
        *(path for path in WITH_BLOCKS if path.name not in SLOW),
        *more(*(path for path in WITH_BLOCKS if path.name in SLOW)),
    ],
    ids=lambda path: path.name,
)
def test_every_block_of_a_guide_runs(path: Path, workplace: None, capsys: pytest.CaptureFixture[str]) -> None:
    output: list[str] = []
    written: set[str] = set()

    section = ""
    for block in blocks(path):
        (*_, section) = (section, *findall(r"(?m)^## (.*)$", block.prose))
        if block.language in RUN and (path.name, section) not in RUN_ELSEWHERE:
            perform(block, output)
            output.append(capsys.readouterr().out)
            written.update(file.name for file in Path().iterdir())

    assert seen_by_git(written) == []
    assert not list(Path().glob("*.py")), "no command of the guide runs the block"
    printed = "\n".join(output)
    for promised in PRINTED.get(path.name, []):
        assert promised in printed, printed
