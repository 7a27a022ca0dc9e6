"""The README and the guides: their blocks, commands, links and paths."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
SECURITY = ROOT / "SECURITY.md"
GUIDES = sorted((ROOT / "examples").glob("*.md"))
INDEX = ROOT / "examples" / "README.md"  # the index of the guides
DOCUMENTS = [README, CONTRIBUTING, SECURITY, *GUIDES]
RUN = ("python", "sh", "yaml", "console")  # languages of blocks that tests run


class Block(NamedTuple):
    """A fenced block."""

    prose: str  # between the block before and this one
    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    found = re.findall(r"(.*?)^```(\w*)\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


def prose(path: Path) -> str:
    """Return a document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Return the commands of a block of shell lines, without comments."""
    lines = (line.partition(" #")[0] for line in text.splitlines())
    return [each.strip() for line in lines for each in line.split(" && ") if each.strip()]


def transcript(text: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with its output."""
    steps = (each.partition("\n") for each in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:])
    return [(line.partition(" #")[0].rstrip(), output.rstrip("\n")) for line, _, output in steps]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def seen_by_git(names: Iterable[str]) -> list[str]:
    """Return the names that `git status` would list as new files of the clone: `.gitignore` has no rule for them."""
    wanted = sorted(names)
    command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: none is ignored
    return [name for name in wanted if name not in done.stdout.splitlines()]
