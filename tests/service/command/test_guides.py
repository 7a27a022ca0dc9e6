"""The programs and commands of README and guides run on a real cluster, in order, as printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from re import findall, split, sub

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
    "docker": "no engine for images runs here; tests/examples/test_kuberay.py reads the lines",
    "helm": "the tests have no Kubernetes",
    "kubectl": "the tests have no Kubernetes; tests/examples/test_kuberay.py parses the commands",
}
WITH_ENGINES = {"engines.md"}  # tests/engines/test_vllm_app.py runs their commands
RUN_ELSEWHERE = {  # guide and section, and the tests that run its programs and commands
    ("fleet.md", "Ray Serve"): "tests/examples/test_serve_app.py; with vLLM: tests/engines",
    ("indexers.md", "Publish events"): "tests/service/exporters",
    ("indexers.md", "Dynamo"): "tests/service/exporters",
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
        "\n0 of 41 tokens were in the pool\n32 of 41 tokens were in the pool\n",
    ],
    "fleet.md": ["960 tokens are at chat-", "1,000 tokens; cost = pending + 3 * uncached", "round_robin"],
    "tiers.md": [
        "0 512\n0 of 512 tokens hit; 512 more are on the host: acquire loads them\n0\n",
        "\n512 of 612 tokens had KV, 512 were loaded\nTrue\n512\n512 of 612 tokens had KV, 0 were loaded\n512\n",
        "\n512 of 512 tokens had KV, 0 came from the disk\n512\n512 of 512 tokens had KV, 512 came from the disk\n",
    ],
    "size.md": ["2048 bytes a token, 128 MiB"],
    "deploy.md": ["True\n"],
    "commands.md": [
        "0 of 100 tokens were cached",
        "96 of 100 tokens were cached",
        "48 of 100 tokens hit",
        "prefix_len=992",
        "1,088 cached",
        "2,080 requested",
        "992 tokens, 96 in 2 nodes below, 1 hit",
    ],
}


@pytest.fixture
def workplace(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a folder with a trace, and check that no cache is left. No heading of a table is cut into lines."""
    monkeypatch.setenv("COLUMNS", "160")
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
            type_in(line, None, output)
    elif names := findall(r"`(\w+\.py)`", block.prose):
        Path(names[-1]).write_text(block.text)
    else:
        execute(block.text)


def type_in(line: str, shown: str | None, output: list[str]) -> None:
    """Run a line of a shell.

    If the guide shows the output, it must have the rows that the command prints. An error must be the same word for
    word. The disk `/nvme` lies next to the working folder.
    """
    match shlex.split(line.replace("/nvme", f"{Path.cwd()}-nvme"), comments=True):
        case ["cat", name]:
            Path(name).write_text(shown or "")
        case ["mkdir", "-p", folder]:
            Path(folder).mkdir(parents=True)
        case ["python", name]:
            execute(Path(name).read_text())
            Path(name).unlink()
        case ["raydix", *arguments]:
            refused = (shown or "").startswith("error:")
            done = run(*arguments, exit_code=NO_SUCH_CACHE if refused else 0)
            output.append(done.stdout)
            if refused:
                assert done.stderr.strip() == shown
            elif shown is not None:
                assert rows_of(shown) == rows_of(done.stdout)[: len(rows_of(shown)) if is_cut(shown) else None]
        case [*words]:
            program = next((word for word in words if "=" not in word), None)  # behind its variables
            assert program is None or program in NOT_RUN, line


def is_cut(shown: str) -> bool:
    """Whether the guide leaves out the last lines of the output."""
    return shown.endswith("\n...")


def rows_of(output: str) -> list[str]:
    """Return the name of each row, the columns of each table and the lines of each tree, without their numbers."""
    rows = []
    lines = [line.rstrip() for line in output.removesuffix("\n...").splitlines()]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        is_head = below.strip().startswith("──")
        if not line.strip("─ ") or (line.startswith("  ") and not is_head):
            continue  # a rule, an empty line, or more of the row above
        cells = split(r" {2,}", line.strip().partition(", last used ")[0])
        rows.append(sub(r"[\d][\d,.]*", "0", " | ".join(cells) if is_head else cells[0]))
    return rows


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


def test_rows_are_told_apart_by_their_names_and_not_by_their_numbers() -> None:
    table = " router  hit rate\n ────────────────\n least     7.7 %\n"
    shown = f"12 requests, 1 cache\n\n{table}\nslots  5 free\n       1 used\n"

    assert rows_of(shown) == ["0 requests, 0 cache", "router | hit rate", "least", "slots"]
    assert rows_of(shown) == rows_of(shown.replace("7.7", "19.3"))
    assert rows_of(shown) != rows_of(shown.replace("slots", "pages"))
    assert rows_of("└── 64 tokens, 0 hits, last used 2 s ago  [1 2]") == ["└── 0 tokens, 0 hits"]
    assert is_cut("a\n...") and not is_cut("a...")
