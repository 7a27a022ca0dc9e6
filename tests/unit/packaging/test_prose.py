"""Public docstrings, errors, help texts and guides avoid the words that the writing guide bans; other texts (comments,
private docstrings, tests) have at most one of each kind in 1,000 words.

`DONE` lists the folders that keep this rule; add a folder when its prose is rewritten. `pytest -s` prints the counts of
the others.

The code names its nouns: a comment behind code stands alone, a loop variable is not called `each`, and "those",
"these", "that of" and "the rest" are rare. The three packages share the limits. `pytest -s` prints the counts by
package.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.documents import CONTRIBUTING, README, ROOT, SECURITY
from support.prose import BANNED, counts_of, found_in, habits_of, texts_below, texts_of

DONE = (
    "actors/*",
    "actors/cli",
    "actors/client",
    "actors/cluster",
    "actors/demo",
    "actors/engines",
    "actors/exporters",
    "actors/fleet",
    "actors/huggingface",
    "actors/loop",
    "actors/memory",
    "actors/metrics",
    "actors/observe",
    "actors/replay",
    "actors/report",
    "actors/serve",
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
    "cache_core/tiers",
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
PRODUCT = PACKAGES[:3]

MOST_LEANING_COMMENTS = 60
MOST_EACH_LOOPS = 30
MOST_PRONOUNS = 2.0  # pronouns in 1,000 words of docstrings and comments


def folders() -> list[str]:
    """Return the folders that hold prose, `actors/*` for the files at the top of `actors`."""
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).iterdir()) if path.is_dir()]
    below = [f"{path.parent.name}/{path.name}" for path in paths if path.name != "__pycache__"]
    return ["examples", *(f"{name}/*" for name in PACKAGES), *below]


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


@pytest.mark.parametrize("path", [README, CONTRIBUTING, SECURITY], ids=lambda path: path.name)
def test_the_documents_of_the_root_have_no_banned_word(path: Path) -> None:
    assert [found for text in texts_of(path, are_tests=False) for found in found_in(text)] == []


def test_the_counts_of_the_other_folders() -> None:
    assert set(DONE) <= set(folders())
    print(f"\n{'':24}" + "".join(f"{kind:>16}" for kind in BANNED) + "   public, other (per 1,000 words)")
    for folder in folders():
        if folder not in DONE:
            counts = counts_of(texts_below(folder))
            cells = (f"{counts.public[kind]}, {counts.per_thousand(kind):.1f}" for kind in BANNED)
            print(f"{folder:24}" + "".join(f"{cell:>16}" for cell in cells))


def test_the_code_names_its_nouns() -> None:
    habits = habits_of(path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py")))
    kinds = {
        "leaning comments": habits.leaning_comments,
        "each loops": habits.each_loops,
        "pronouns": habits.pronouns,
    }
    print(f"\n{'':24}" + "".join(f"{package:>16}" for package in PRODUCT))
    for kind, found in kinds.items():
        by_package = Counter(place.partition("/")[0] for _, place, _ in found)
        print(f"{kind:24}" + "".join(f"{by_package[package]:16}" for package in PRODUCT))
    print(f"{habits.pronouns_per_thousand:.2f} pronouns in 1,000 words")

    assert len(habits.leaning_comments) <= MOST_LEANING_COMMENTS, habits.leaning_comments
    assert len(habits.each_loops) <= MOST_EACH_LOOPS, habits.each_loops
    assert habits.pronouns_per_thousand <= MOST_PRONOUNS, habits.pronouns


def test_each_kind_of_word_is_found_outside_of_code(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text("Return what is left, and\nwhat is not; who is told\nof it at once. `beside` is code. What if?\n")

    (text,) = texts_of(path, are_tests=False)

    assert [found.kind for found in found_in(text)] == ["headless what", "headless what", "persons", "tell", "archaic"]


def test_habits_are_found_and_their_neighbours_are_not(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Nodes, and those of `these`."""\n'
        "sizes = {}  # by name\n"
        "counts = {}  # name -> count of a node\n"
        "# by itself, this comment stands above its code\n"
        'text = "# of a string"\n'
        "for each in sizes:\n"
        "    print([node for node in each])  # offline\n"
        "found = {(first, each) for first, each in counts}\n"
    )

    habits = habits_of([path])

    assert [found.place for found in habits.leaning_comments] == ["module.py:2"]
    assert [found.place for found in habits.each_loops] == ["module.py:6", "module.py:8"]
    assert [(found.place, found.excerpt) for found in habits.pronouns] == [
        ("module.py:1", "Nodes, and those of `code`.")
    ]
    assert habits.num_words == 5 + 2 + 6 + 8 + 1
    assert habits.pronouns_per_thousand == pytest.approx(1000 / 22)


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
