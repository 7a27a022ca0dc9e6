"""README and guides name files, links, commands and make targets that exist, and each of their commands is run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic.fields import FieldInfo
from ray.scripts.scripts import cli as ray_commands
from support.documents import (
    DOCUMENTS,
    GUIDES,
    INDEX,
    README,
    ROOT,
    RUN,
    anchors,
    blocks,
    commands,
    prose,
    seen_by_git,
    transcript,
)
from support.processes.command_line import run

from raydix.actors.cli.app import COMMANDS, GROUPS
from raydix.actors.engines.settings import EngineSettings

FOLDERS = ("actors", "cache_core", "examples", "schemas", "tests")
NOT_CODE = ("", "promql")  # diagrams, output and queries
MAX_README_WORDS = 1500

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@each_document
def test_every_command_stands_in_a_block_that_is_run(path: Path) -> None:
    for _, language, text in blocks(path):
        assert language in (*RUN, *NOT_CODE)
        if language in NOT_CODE:
            assert not re.search(r"^(?:\$|raydix|make|python3?|pip|ray|git) ", text, flags=re.MULTILINE), text
    assert not re.search(r"^    \S", prose(path), flags=re.MULTILINE), (
        "no test runs an indented block; use a fenced one"
    )


@each_document
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path

        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@each_document
def test_every_path_named_exists(path: Path) -> None:
    named = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w/?)", path.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


@each_document
def test_every_command_named_in_passing_exists(path: Path) -> None:
    for line in re.findall(r"`raydix ([a-z][^`]*)`", prose(path)):
        command, *options = line.split()
        assert command in COMMANDS or command in GROUPS
        shown = run(command, *options[: command in GROUPS], "--help").stdout
        assert [each for each in re.findall(r"--[a-z-]+", line) if each not in shown] == []


@each_document
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    assert set(re.findall(r"(?:^|`)make\s([a-z-]+)", path.read_text(), flags=re.MULTILINE)) <= targets


@each_document
def test_every_program_named_in_passing_takes_the_options_named(path: Path) -> None:
    for line in re.findall(r"`python3? ([^`]*)`", prose(path)):
        program, *arguments = shlex.split(line)
        if program == "-m":
            program = f"tests/{arguments.pop(0).replace('.', '/')}.py"
        source = (ROOT / program).read_text()
        assert [each for each in arguments if each.startswith("--") and f'"{each}"' not in source] == []


@each_document
def test_every_program_compiles(path: Path) -> None:
    for _, language, text in blocks(path):
        if language == "python":
            compile(text, str(path), "exec")


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_guide_names_the_extra_of_an_option_that_needs_one_before_it(path: Path) -> None:
    before, option, _ = path.read_text().partition("\nraydix replay trace.jsonl --plot ")
    assert not option or re.search(r"pip install .*\[.*plot.*\]", before)


def test_the_engines_guide_has_each_setting_with_its_default() -> None:
    table = (ROOT / "examples/engines.md").read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|(?: (.*?))? \| (.*) \|$", table, flags=re.MULTILINE)

    def default_of(field: FieldInfo) -> str:
        return "" if field.is_required() else f"`{json.dumps(field.default)}`"

    assert rows == [(name, default_of(field), field.description) for name, field in EngineSettings.model_fields.items()]


def files_written(text: str) -> set[str]:
    """Return the files that a guide's commands and programs write, by the forms that guides use."""
    forms = (
        r"(?:-o|--out|--plot) ([a-z][\w.-]*)",
        r"small_chat_model\.py ([\w-]+)",
        r"(?m)^# (\w+\.yaml)$",
        r"Path\(\"([\w.]+)\"\)\.write_text",
        r"(?m)^python (\w+\.py)",
    )
    return {name if "." in name else f"{name}/" for form in forms for name in re.findall(form, text)}


def test_files_that_a_guide_writes_leave_git_status_clean() -> None:
    written = set[str]().union(*(files_written(guide.read_text()) for guide in GUIDES))

    assert {"chat.py", "cache.yaml", "kv-0.html", "small-chat/", "sizes.png", "tokens.json"} <= written
    assert seen_by_git(written) == []
    assert seen_by_git({"other.py", "tests/other.html"}) == ["other.py", "tests/other.html"]


def test_the_readme_is_short_and_links_to_every_guide() -> None:
    text = README.read_text()

    assert len(text.split()) <= MAX_README_WORDS
    assert [guide.name for guide in GUIDES if f"](examples/{guide.name})" not in text] == []


def test_a_guide_names_its_readers_first_and_the_index_lists_it_for_each_of_them() -> None:
    listed: dict[str, set[str]] = {}
    for role, links in re.findall(r"^## (.*)\n(.*(?:\n(?!## ).*)*)", INDEX.read_text(), flags=re.MULTILINE):
        for name in re.findall(r"\]\(([\w-]+\.md)\)", links):
            listed.setdefault(name, set()).add(role.lower())
    named = {}
    for guide in GUIDES:
        if guide != INDEX:
            readers = re.match(r"# .*\n\nFor (.*)\.\n\n", guide.read_text())
            assert readers is not None, f"{guide.name}: the line below the title must be `For operators.`, or the like"
            named[guide.name] = set(re.split(r", | and ", readers[1]))

    assert named == listed


def test_the_site_has_each_guide_in_its_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    pages = re.findall(r"([\w-]+\.md)$", navigation, flags=re.MULTILINE)

    assert sorted(pages) == sorted(["index.md", *("guides.md" if guide == INDEX else guide.name for guide in GUIDES)])


def test_the_glossary_has_30_words_each_once() -> None:
    glossary = (ROOT / "examples/glossary.md").read_text()
    words = re.findall(r"^\| ([\w ]+) \|", glossary, flags=re.MULTILINE)[1:]

    assert len(words) == len(set(words)) == 30


def test_the_walk_begins_with_a_clone_and_ends_the_cluster_that_it_starts() -> None:
    """Check the commands that test_guides.py cannot run."""
    walk = [block for block in blocks(ROOT / "examples/commands.md") if block.language == "sh"]
    lines = [command for block in walk for command in commands(block.text)]

    assert [" ".join(line.split()[:2]) for line in lines] == [
        "git clone",
        "cd raydix",
        "python3 -m",
        ". .venv/bin/activate",
        "pip install",
        "export RAY_AUTH_MODE=token",
        "ray get-auth-token",
        "RAY_worker_niceness=0 ray",
        "python settings.py",
        "raydix start",
        "python worker.py",
        "raydix stats",
        "raydix explain",
        "raydix report",
        "raydix stop",
        "ray stop",
    ]
    for line in lines:
        program, name, *options = line.removeprefix("RAY_worker_niceness=0 ").split()
        if program != "ray":
            continue
        shown = CliRunner().invoke(ray_commands, [name, "--help"]).output
        assert [each for each in options if each.startswith("--") and each not in shown] == []


def test_every_cluster_of_a_guide_starts_without_niceness() -> None:
    """Ray's default has workers give way to all other programs of the node."""
    texts = [path.read_text() for path in (*DOCUMENTS, *(ROOT / "examples").glob("*.py"))]
    lines = [line.strip() for text in texts for line in text.splitlines() if "ray start --head" in line]

    assert len(lines) > 3
    told = [line for line in lines if not line.startswith("RAY_worker_niceness=0 ray start --head")]
    assert [line for line in told if not line.startswith("sys.exit(")] == []


def test_a_transcript_is_read_as_commands_with_their_output() -> None:
    shown = "$ cat a.yaml\nname: a\n\n$ raydix stats a   # live\na  radix\n\n$ raydix stop a\n"

    assert transcript(shown) == [("cat a.yaml", "name: a"), ("raydix stats a", "a  radix"), ("raydix stop a", "")]
