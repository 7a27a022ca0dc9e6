"""Public docstrings, errors, help texts and guides avoid the words that the writing guide bans; other texts (comments,
private docstrings, tests) have at most one of each kind in 1,000 words.

`DONE` lists the folders that keep this rule; add a folder when its prose is rewritten. `pytest -s` prints the counts of
the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.documents import README, ROOT
from support.prose import BANNED, counts_of, found_in, texts_below, texts_of

DONE = (
    "actors/*",
    "actors/cli",
    "actors/client",
    "actors/engines",
    "actors/exporters",
    "actors/fleet",
    "actors/huggingface",
    "actors/metrics",
    "actors/observe",
    "actors/report",
    "actors/service",
    "actors/sessions",
    "actors/transport",
    "cache_core/*",
    "cache_core/components",
    "cache_core/fleet_index",
    "cache_core/eviction",
    "cache_core/ghost",
    "cache_core/kernels",
    "cache_core/leases",
    "cache_core/pool",
    "cache_core/radix",
    "cache_core/rows",
    "cache_core/tree",
    "cache_core/trie",
    "examples",
    "schemas/*",
    "tests/*",
    "tests/benchmarks",
    "tests/chaos",
    "tests/examples",
    "tests/promises",
    "tests/property",
    "tests/service",
    "tests/support",
    "tests/unit",
)
PACKAGES = ("actors", "cache_core", "schemas", "tests")


def folders() -> list[str]:
    """Return the folders that hold prose, `actors/*` for the files at the top of `actors`."""
    below = [f"{name}/{path.name}" for name in PACKAGES for path in sorted((ROOT / name).iterdir()) if path.is_dir()]
    return ["examples", *(f"{name}/*" for name in PACKAGES), *(each for each in below if "__pycache__" not in each)]


@pytest.mark.parametrize("folder", DONE)
def test_public_texts_have_no_banned_word(folder: str) -> None:
    assert [found for text in texts_below(folder) if text.is_public for found in found_in(text)] == []


@pytest.mark.parametrize("folder", DONE)
def test_other_texts_have_hardly_any(folder: str) -> None:
    texts = texts_below(folder)
    counts = counts_of(texts)

    most = max(1, counts.other_words // 1000)  # of each kind
    too_many = {kind for kind in BANNED if counts.other[kind] > most}

    assert [found for text in texts if not text.is_public for found in found_in(text) if found.kind in too_many] == []


def test_the_readme_has_no_banned_word() -> None:
    assert [found for text in texts_of(README, are_tests=False) for found in found_in(text)] == []


def test_the_counts_of_the_other_folders() -> None:
    assert set(DONE) <= set(folders())
    print(f"\n{'':24}" + "".join(f"{kind:>16}" for kind in BANNED) + "   public, other (per 1,000 words)")
    for folder in folders():
        if folder not in DONE:
            counts = counts_of(texts_below(folder))
            cells = (f"{counts.public[kind]}, {counts.per_thousand(kind):.1f}" for kind in BANNED)
            print(f"{folder:24}" + "".join(f"{cell:>16}" for cell in cells))


def test_each_kind_of_word_is_found_outside_of_code(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text("Return what is left, and\nwhat is not; who is told\nof it at once. `beside` is code. What if?\n")

    (text,) = texts_of(path, are_tests=False)

    assert [each.kind for each in found_in(text)] == ["headless what", "headless what", "persons", "tell", "archaic"]


def test_errors_help_and_docstrings_are_public_and_comments_are_not(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""module"""\n'
        "def _private():\n"
        '    """private"""  # comment\n'
        "class Public:\n"
        '    def method(self):\n        """method"""\n'
        '        raise ValueError(f"error {self!r}")\n'
        'typer.Option(help="help")\n'
    )

    texts = {text.words.strip(): text.is_public for text in texts_of(path, are_tests=False)}

    public = {"module": True, "method": True, "error": True, "help": True}
    assert texts == public | {"private": False, "comment": False}
