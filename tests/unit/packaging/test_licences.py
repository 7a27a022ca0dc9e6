"""SECURITY.md names the licence of each dependency, as the package declares it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata

import pytest
from support.documents import ROOT, SECURITY

EXTRAS = ("transformers", "zmq", "plot", "serve", "metrics")  # other extras are for development


def licences() -> dict[str, str]:
    """Return the licence that the table has for each package."""
    table = SECURITY.read_text().partition("\n## Licences of dependencies\n")[2]
    rows = re.findall(r"^\| (.*`.*) \| (.*) \|$", table, flags=re.MULTILINE)
    return {name: licence for names, licence in rows for name in re.findall(r"`([\w-]+)`", names.rpartition(": ")[2])}


def test_each_dependency_has_its_row() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(name for extra in EXTRAS for name in project["optional-dependencies"][extra])]

    assert {re.split(r"[\[<>=;~! ]", requirement)[0] for requirement in needed} == set(licences())


@pytest.mark.parametrize("package", sorted(licences()))
def test_the_licence_is_that_of_the_package(package: str) -> None:
    """A licence that the package declares as a text is not compared. Older packages name a family, such as BSD."""
    declared = metadata(package)
    expression = declared.get("License-Expression") or declared.get("License") or ""
    if declared.get("License-Expression") or len(expression.split()) == 1:
        names = set(re.findall(r"[\w.-]+", expression)) - {"AND", "OR", "WITH", "LLVM-exception"}
        in_row = re.findall(r"[\w.-]+", licences()[package])

        assert {name for name in names if not any(f"{word}-".startswith(f"{name}-") for word in in_row)} == set()
