"""The prose of a folder: banned words in its texts, and habits that make a reader search for a noun."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.documents import ROOT, prose

HEADLESS = r"(?:^|[.,:;(]\s*|\b(?:of|by|to|in|and|or|is|that|for|from|with|as|than)\s+)what\b"
BANNED = {
    "headless what": re.compile(HEADLESS, re.IGNORECASE),
    "persons": re.compile(r"\b(?:who|whom|whoever|whose|nobody|somebody|anybody)\b", re.IGNORECASE),
    "tell": re.compile(r"\b(?:tell|tells|told)\b", re.IGNORECASE),
    "archaic": re.compile(r"\b(?:anew|likewise|of late|and no more|beside(?!\()|at once)\b", re.IGNORECASE),
}
LEANING_COMMENT = re.compile(
    r"(?:of|for|from|by|in|on|at|with|without|to|as|than|through|within|into|between|among|against|behind|below|above"
    r"|under|over|beyond|per|since|during|besides|after|before|until|instead of|that|which|where|when|while|if|unless"
    r"|because|so|and|or|but)\b",
    re.IGNORECASE,
)
STANDS_FOR_A_NOUN = re.compile(r"\b(?:those|these|that of|the rest)\b", re.IGNORECASE)
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
HELP_ARGUMENTS = ("help", "epilog", "short_help", "description")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Text(NamedTuple):
    """A docstring, a comment, a message or a help text."""

    path: Path
    line: int
    is_public: bool
    words: str  # without inline code


class Comment(NamedTuple):
    """A comment, or one line of it."""

    line: int
    words: str
    is_behind_code: bool


class Found(NamedTuple):
    """A banned word or a habit."""

    kind: str
    place: str  # file and line
    excerpt: str


class Habits(NamedTuple):
    """Places that make a reader search for a noun, and the words of all docstrings and comments."""

    leaning_comments: list[Found]  # comments behind code that begin with a preposition or a conjunction
    each_loops: list[Found]  # loops and comprehensions over a variable called `each`
    pronouns: list[Found]  # "those", "these", "that of" or "the rest" in a docstring or a comment
    num_words: int

    @property
    def pronouns_per_thousand(self) -> float:
        """The pronouns in 1,000 words of docstrings and comments."""
        return 1000 * len(self.pronouns) / max(self.num_words, 1)


class Counts(NamedTuple):
    """The banned words of a folder."""

    public: Counter[str]
    other: Counter[str]
    other_words: int

    def per_thousand(self, kind: str) -> float:
        """Return the banned words of a kind in 1,000 words that are not public."""
        return 1000 * self.other[kind] / max(self.other_words, 1)


def texts_of(path: Path, are_tests: bool) -> Iterator[Text]:
    """Yield the texts of a Python file or a guide. The docstrings of tests are not public."""
    if path.suffix == ".md":
        yield Text(path, 1, True, _without_code(prose(path)))
        return
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for line, is_public, words in (*_docstrings(tree), *_comments(_single_comments(source)), *_messages(tree)):
        yield Text(path, line, is_public and not are_tests, _without_code(words))


def texts_below(folder: str) -> list[Text]:
    """Return the texts of a folder's own files and of all folders in it. `actors/*` leaves out the latter."""
    name, only_files, _ = folder.partition("/*")
    files = (ROOT / name).glob("*" if only_files else "**/*")
    paths = sorted(path for path in files if path.suffix in (".py", ".md"))
    return [text for path in paths for text in texts_of(path, are_tests=name.startswith("tests"))]


def found_in(text: Text) -> Iterator[Found]:
    """Yield the banned words of a text."""
    for kind, pattern in BANNED.items():
        yield from _matches(text, kind, pattern)


def _matches(text: Text, kind: str, pattern: re.Pattern[str]) -> Iterator[Found]:
    for match in pattern.finditer(text.words):
        start = max(match.start() - 40, 0)
        line = text.line + text.words.count("\n", 0, match.start())
        yield Found(kind, _place(text.path, line), " ".join(text.words[start : match.end() + 40].split()))


def counts_of(texts: list[Text]) -> Counts:
    """Count the banned words of some texts."""
    counters: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for text in texts:
        counters[text.is_public].update(found.kind for found in found_in(text))
    words = sum(len(text.words.split()) for text in texts if not text.is_public)
    return Counts(counters[True], counters[False], words)


def habits_of(paths: Iterable[Path]) -> Habits:
    """Return the habits of Python files."""
    habits = Habits([], [], [], 0)
    for path in paths:
        source = path.read_text(encoding="utf-8")
        tree, comments = ast.parse(source), _single_comments(source)
        texts = [
            Text(path, line, is_public, _without_code(words))
            for line, is_public, words in (*_docstrings(tree), *_comments(comments))
        ]
        habits.leaning_comments.extend(_leaning_comments(path, comments))
        habits.each_loops.extend(_each_loops(path, tree))
        habits.pronouns.extend(found for text in texts for found in _matches(text, "pronoun", STANDS_FOR_A_NOUN))
        habits = habits._replace(num_words=habits.num_words + sum(len(text.words.split()) for text in texts))
    return habits


def _leaning_comments(path: Path, comments: list[Comment]) -> Iterator[Found]:
    for comment in comments:
        if comment.is_behind_code and LEANING_COMMENT.match(comment.words):
            yield Found("leaning comment", _place(path, comment.line), comment.words)


def _each_loops(path: Path, tree: ast.Module) -> Iterator[Found]:
    for node in ast.walk(tree):
        if isinstance(node, LOOPS) and "each" in _names_in(node.target):
            yield Found("each", _place(path, node.target.lineno), ast.unparse(node.target))


def _names_in(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _place(path: Path, line: int) -> str:
    """Return a file and a line, the file from the root of the repository if it lies there."""
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"


def _without_code(text: str) -> str:
    return re.sub(r"``.*?``|`[^`\n]*`", "`code`", text, flags=re.DOTALL)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, bool, str]]:
    def walk(node: ast.AST, is_public: bool) -> Iterator[tuple[int, bool, str]]:
        name = getattr(node, "name", None) or ""
        is_public = is_public and (not name.startswith("_") or name.startswith("__"))
        if isinstance(node, DEFINITIONS) and (docstring := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, is_public, docstring
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_public)

    return walk(tree, True)


def _comments(comments: list[Comment]) -> Iterator[tuple[int, bool, str]]:
    """Yield the comments; those on consecutive lines of their own are one."""
    block: list[str] = []
    last = 0
    for line, words, is_behind_code in comments:
        if block and line == last + 1 and not is_behind_code:
            block.append(words)
        else:
            if block:
                yield last - len(block) + 1, False, "\n".join(block)
            block = [words]
        last = line
    if block:
        yield last - len(block) + 1, False, "\n".join(block)


def _single_comments(source: str) -> list[Comment]:
    """Return the comments of a file, each line on its own."""
    return [
        Comment(token.start[0], token.string.lstrip("# "), bool(token.line[: token.start[1]].strip()))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]


def _messages(tree: ast.Module) -> Iterator[tuple[int, bool, str]]:
    """Yield the strings of raised errors and of help texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _strings(node.exc)
        elif isinstance(node, ast.keyword) and node.arg in HELP_ARGUMENTS:
            yield from _strings(node.value)


def _strings(node: ast.AST) -> Iterator[tuple[int, bool, str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, True, part.value
