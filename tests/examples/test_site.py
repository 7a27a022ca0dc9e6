"""The site of `make docs`: it builds without a warning, its links lead somewhere, and its reference has every name."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, reduce
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, get_args
from urllib.parse import unquote, urldefrag

import pytest
import typer.main
from pydantic import BaseModel
from support.documents import GUIDES, README, ROOT, blocks

from raydix.actors.cli.app import app
from raydix.actors.metrics.table import METRICS
from raydix.schemas import CacheConfig, CacheError, CacheStats

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not find_spec("mkdocstrings"), reason="needs the extra docs: make docs"),
]

PACKAGES = ("raydix.actors", "raydix.cache_core", "raydix.schemas")
LOADED = {"link": "href", "script": "src", "img": "src"}  # elements that a browser loads, and their attribute


class Page(NamedTuple):
    """A page's anchors, links, and the files that it loads."""

    anchors: set[str]
    links: list[str]
    loaded: list[str]
    text: str


class PageParser(HTMLParser):
    """Collects the parts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page(set(), [], [], "")
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.page.anchors.add(attributes.get("id") or "")
        if tag == "a" and attributes.get("href"):
            self.page.links.append(str(attributes["href"]))
        if tag in LOADED and attributes.get(LOADED[tag]):
            self.page.loaded.append(str(attributes[LOADED[tag]]))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@cache
def page_at(path: Path) -> Page:
    parser = PageParser()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser.page._replace(text=" ".join("".join(parser.words).split()))


def pages_of(site: Path) -> dict[str, Page]:
    """Return the pages by their paths, without the one for wrong addresses, which has links of a server."""
    paths = (path for path in sorted(site.rglob("*.html")) if path.name != "404.html")
    return {str(path.relative_to(site)): page_at(path) for path in paths}


def anchors_of_reference(site: Path) -> set[str]:
    return {anchor for path, page in pages_of(site).items() if path.startswith("reference/") for anchor in page.anchors}


def is_elsewhere(target: str) -> bool:
    return re.match(r"\w+:|//", target) is not None


def test_every_link_leads_to_a_page_and_an_anchor(site: Path) -> None:
    pages = pages_of(site)
    broken = []
    for path, page in pages.items():
        for target in page.links:
            if is_elsewhere(target):
                continue
            name, anchor = urldefrag(target)
            linked = os.path.normpath(site / Path(path).parent / unquote(name)) if name else str(site / path)
            if not Path(linked).is_file():
                broken.append(f"{path}: {target}")
            elif anchor and linked.endswith(".html") and unquote(anchor) not in page_at(Path(linked)).anchors:
                broken.append(f"{path}: {target}")

    assert broken == []


def test_a_page_loads_no_file_from_another_server(site: Path) -> None:
    loaded = {target for page in pages_of(site).values() for target in page.loaded}

    assert loaded
    assert [target for target in loaded if is_elsewhere(target)] == []


def test_every_page_can_be_reached_from_the_start_page(site: Path) -> None:
    reached, left = {"index.html"}, ["index.html"]
    while left:
        path = left.pop()
        for target in page_at(site / path).links:
            linked = os.path.normpath(Path(path).parent / urldefrag(target)[0])
            if not is_elsewhere(target) and linked.endswith(".html") and linked not in reached:
                reached.add(linked)
                left.append(linked)

    assert reached == set(pages_of(site))


def test_the_start_page_is_the_readme_and_links_to_the_guides(site: Path) -> None:
    start = page_at(site / "index.html")

    for title in re.findall(r"^## (.*)$", README.read_text(), flags=re.MULTILINE):
        assert title in start.text
    guides = {"guides.html" if guide.name == "README.md" else f"{guide.stem}.html" for guide in GUIDES}
    assert guides <= set(start.links)


def test_a_program_that_a_document_names_is_a_page_with_its_source(site: Path) -> None:
    programs = sorted((ROOT / "examples").glob("*.py"))
    linked = page_at(site / "index.html").links

    for program in programs:
        page = f"programs/{program.name}.html"
        assert " ".join(program.read_text().split()) in page_at(site / page).text
        assert f"`examples/{program.name}`" not in README.read_text() or page in linked
    assert any(target.startswith("programs/") for target in linked)
    assert {path.suffix for path in site.rglob("*")} & {".py", ".pyc"} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_exactly_the_public_names(site: Path, package: str) -> None:
    names = set(importlib.import_module(package).__all__)
    below = [re.fullmatch(rf"{package}\.([A-Za-z]\w*)", anchor) for anchor in anchors_of_reference(site)]

    assert {found[1] for found in below if found} == names
    listed = page_at(site / "reference/names.html").text
    assert [name for name in names if name not in listed] == []


def test_the_reference_has_the_names_that_guides_import_from_modules(site: Path) -> None:
    programs = [ast.parse(block.text) for guide in GUIDES for block in blocks(guide) if block.language == "python"]
    imports = [node for program in programs for node in ast.walk(program) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if re.match(r"raydix\.(?!actors\.demo\.)", node.module or "")]
    imported = {f"{node.module}.{name.name}" for node in ours for name in node.names}

    assert "raydix.actors.huggingface.worker.TransformersWorker" in imported
    assert imported - anchors_of_reference(site) == set()


def without_layout(code: str) -> str:
    """Return code without spaces, quotes of annotations, and the commas that end lines of arguments."""
    return re.sub(r"[\s']|,(?=\s*\))", "", code)


@pytest.mark.parametrize(
    "path", ["Fleet.acquire", "PrefixCacheClient.insert", "PrefixCacheClient.grant", "acquire_ranks"]
)
def test_the_reference_has_the_arguments_that_are_passed_on(site: Path, path: str) -> None:
    verb = reduce(getattr, path.split("."), importlib.import_module("raydix.actors"))
    shown = inspect.signature(verb)
    shown = shown.replace(parameters=[part for name, part in shown.parameters.items() if name != "self"])
    (page,) = (page for page in pages_of(site).values() if f"raydix.actors.{path}" in page.anchors)

    assert without_layout(f"{verb.__name__}{shown}") in without_layout(page.text)


def models_in(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a model, and those of its fields."""
    yield model
    for field in model.model_fields.values():
        types = [field.annotation, *get_args(field.annotation)]
        for part in (inner for kind in types for inner in (kind, *get_args(kind))):
            if inspect.isclass(part) and issubclass(part, BaseModel):
                yield from models_in(part)


@pytest.mark.parametrize("model", [CacheConfig, CacheStats])
def test_the_reference_has_every_field_with_its_meaning(site: Path, model: type[BaseModel]) -> None:
    pages = [page for path, page in pages_of(site).items() if path.startswith("reference/schemas.")]
    anchors = {anchor for page in pages for anchor in page.anchors}
    text = re.sub(r"\W", "", " ".join(page.text for page in pages))
    parts = set(models_in(model))

    assert len(parts) >= 6
    for part in parts:
        for name, field in part.model_fields.items():
            owner = next(base for base in part.__mro__ if name in base.__annotations__)
            assert f"raydix.schemas.{owner.__name__}.{name}" in anchors
            assert not field.description or re.sub(r"\W", "", field.description) in text


def test_the_reference_has_the_attributes_of_every_error(site: Path) -> None:
    anchors = anchors_of_reference(site)
    errors = [(error, vars(error)) for error in CacheError.__subclasses__()]

    arguments = [
        f"raydix.schemas.{error.__name__}.{name}"
        for error, own in errors
        if "__init__" in own
        for name in list(inspect.signature(own["__init__"]).parameters)[1:]
        if name != "message"
    ]
    assert "raydix.schemas.PoolExhausted.deadlocked" in arguments
    assert set(arguments) - anchors == set()


def test_the_reference_has_every_metric(site: Path) -> None:
    text = page_at(site / "metrics.html").text

    assert [metric.exported_name for metric in METRICS if metric.exported_name not in text] == []


def test_the_reference_has_the_help_of_every_command(site: Path) -> None:
    page = page_at(site / "reference/command_line.html")
    commands = [("raydix", typer.main.get_command(app))]

    for name, command in commands:
        commands += [(f"{name} {word}", below) for word, below in getattr(command, "commands", {}).items()]
        assert name == "raydix" or name.replace(" ", "-") in page.anchors
        context = command.make_context(name, [], resilient_parsing=True)
        records = filter(None, (parameter.get_help_record(context) for parameter in command.get_params(context)))
        for text in (command.help.partition("\n\n")[0], *(cell for record in records for cell in record)):
            assert " ".join(text.replace("`", "").split()) in page.text.replace("`", ""), name
    assert len(commands) > 16


def test_the_search_finds_sections_of_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"]}

    assert {urldefrag(place)[0] or "index.html" for place in places} == set(pages_of(site))
    assert "reference/schemas.errors.html#raydix.schemas.PoolExhausted" in places
