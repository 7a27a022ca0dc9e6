"""The events of MkDocs: pages that are made from other files of the repository, their links, and the navigation.

The guides are the pages as they lie in `examples/`. This module adds the README as the start page, the other documents
of the root, each program with its source, and the reference that `reference.py` writes.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import sections

ROOT = Path(__file__).resolve().parents[1]
GUIDES = "examples"
INDEX = f"{GUIDES}/README.md"  # MkDocs would make it the start page
DOCUMENTS = {  # path in the repository -> path of the page, or nothing if the file does not exist
    "README.md": "index.md",
    INDEX: "guides.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "sh", ".txt": "text", "": "text"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
NAMED_PROGRAM = re.compile(r"(?<!\[)`(examples/[\w./-]+)`")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def page_of(path: str) -> str | None:
    """Return the path that a file of the repository has on the site; None: it is not there."""
    if not (ROOT / path).is_file():
        return None
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    folder, _, name = path.partition("/")
    if folder != GUIDES:
        return None
    return f"programs/{name}.md" if is_program(path) else name


def is_program(path: str) -> bool:
    """Whether a file of the guides' folder is shown as a page with its source."""
    return Path(path).suffix in LANGUAGES


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation by the pages that other files make."""
    parts: dict[str, list[Any]] = {title: pages for entry in config.nav or () for title, pages in entry.items()}
    first, *others = ((section.title, [{page.title: page.path} for page in section.pages]) for section in sections())
    parts["Reference"][:0] = first[1]
    parts["Reference"].extend({title: pages} for title, pages in others)
    parts["Programs"].extend(page_of(path) for path in programs())
    parts["Project"].extend(page_of(path) for path in documents() if path not in ("README.md", INDEX))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and take away the files that have become pages."""
    for file in list(files):
        if page_of(f"{GUIDES}/{file.src_uri}") not in (None, file.src_uri):
            files.remove(file)
    made = {path: (ROOT / path).read_text() for path in documents()}
    made["LICENSE"] = f"# License\n\n```text\n{made['LICENSE']}```\n"
    made |= {path: source_page(path) for path in programs()}
    pages = {page_of(path) or path: text for path, text in made.items()}
    pages |= {page.path: page.text for section in sections() for page in section.pages}
    pages["style.css"] = (ROOT / ".site" / "style.css").read_text()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links between files of the repository to the pages of these files."""
    path = next((name for name in [*documents(), *guides()] if page_of(name) == page.file.src_uri), None)
    if path is None:
        return markdown
    parts = FENCED.split(markdown)
    parts[::2] = [with_links_to_pages(part, path) for part in parts[::2]]
    return "".join(parts)


def with_links_to_pages(text: str, path: str) -> str:
    """Return a document's text without fenced blocks, with links to pages; names of programs become links, too."""
    folder = posixpath.dirname(path)
    here = posixpath.dirname(page_of(path) or "")

    def link_to(target: str) -> str:
        wanted = page_of(target)
        if wanted is None:
            raise PluginError(f"{path} links to {target}, which has no page: link to a guide, a program or a document")
        return posixpath.relpath(wanted, here or ".")

    def named(match: re.Match[str]) -> str:
        return f"[{match[0]}]({link_to(match[1])})" if page_of(match[1]) else match[0]

    linked = LINK.sub(lambda match: link_to(posixpath.normpath(posixpath.join(folder, match[1]))), text)
    return NAMED_PROGRAM.sub(named, linked)


def source_page(path: str) -> str:
    """Return a page with a program's source."""
    language = LANGUAGES[Path(path).suffix]
    return f'# {Path(path).relative_to(GUIDES)}\n\n````{language} title="{path}"\n{(ROOT / path).read_text()}````\n'


def documents() -> list[str]:
    """Return the documents that exist, by their paths in the repository."""
    return [path for path in DOCUMENTS if (ROOT / path).is_file()]


def guides() -> list[str]:
    """Return the guides, by their paths in the repository."""
    return [f"{GUIDES}/{path.relative_to(ROOT / GUIDES)}" for path in sorted((ROOT / GUIDES).rglob("*.md"))]


def programs() -> list[str]:
    """Return the programs and manifests that lie next to the guides, by their paths in the repository."""
    paths = (path for path in sorted((ROOT / GUIDES).rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [str(path.relative_to(ROOT)) for path in paths if is_program(str(path))]
