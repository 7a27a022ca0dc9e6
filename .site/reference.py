"""The reference: pages of the public names, and one of the commands.

mkdocstrings fills the pages of names from docstrings. A name of `raydix.actors` or `raydix.cache_core` stands on the
page of its folder, a name of `raydix.schemas` on the page of its module.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import typer.main
from pydantic import BaseModel

from raydix.actors.cli.app import app

PACKAGES = ("raydix.actors", "raydix.cache_core", "raydix.schemas")
# Public names that are imported from their own modules: they need an extra, or serve one kind of program.
FURTHER = (
    "raydix.actors.client.tracing.trace_verbs",
    "raydix.actors.cluster.settings.load_settings",
    "raydix.actors.engines.settings.EngineSettings",
    "raydix.actors.engines.vllm.connector.RaydixConnector",
    "raydix.actors.exporters.vllm_events.VllmEventExporter",
    "raydix.actors.huggingface.worker.TransformersWorker",
    "raydix.actors.huggingface.worker.cache_config_for",
    "raydix.actors.huggingface.worker.pool_config_for",
    "raydix.actors.observe.json_logs.log_as_json",
    "raydix.actors.serve.llm.NearServer",
    "raydix.actors.serve.llm.node_resource",
    "raydix.actors.serve.llm.router_config",
    "raydix.actors.serve.llm.transfer_config",
    "raydix.actors.serve.router.request_router_config",
    "raydix.actors.serve.router.running_routers",
    "raydix.schemas.engine_namespace.namespace_of",
)
TITLES = {
    "actors.client": "Clients and leases",
    "actors.cluster": "Start and find caches",
    "actors.engines": "Engines",
    "actors.exporters": "Exporters of events",
    "actors.fleet": "Router",
    "actors.huggingface": "Hugging Face",
    "actors.observe": "Logs",
    "actors.serve": "Ray Serve",
    "actors.service": "Cache actor",
    "cache_core": "Prefix caches",
    "cache_core.components": "Components of nodes",
    "cache_core.errors": "Errors of the core",
    "cache_core.fleet_index": "Index for routers",
    "cache_core.leases": "Leases of the core",
    "cache_core.pool": "Pools and allocators",
    "cache_core.rows": "Rows",
    "cache_core.tree": "Tree",
    "cache_core.trie": "Trie",
    "schemas.config": "Configuration",
    "schemas.explain": "Explanation of a miss",
    "schemas.message": "Messages and tokens",
    "schemas.stats": "Statistics",
    "schemas.tree": "Outline of the tree",
}
MERGED = {  # module -> the module with the page of its names
    "schemas.engine_namespace": "schemas.message",
    "schemas.namespace": "schemas.message",
    "schemas.segment": "schemas.config",
    "schemas.tenants": "schemas.config",
    "schemas.tokens": "schemas.message",
}
HAVE_LONG_DOCSTRINGS = ("cache_core",)  # the page of names has it
HEAD = "| name | |\n|---|---|"


class PageMade(NamedTuple):
    """A page of the reference."""

    title: str
    path: str
    text: str


class Section(NamedTuple):
    """Pages that stand together in the navigation."""

    title: str
    pages: list[PageMade]


@cache
def sections() -> tuple[Section, ...]:
    """Return the pages of the reference by section, in the order of the navigation. The first section has no title."""
    return Section("", [names_page(), commands_page()]), *(Section(name, pages_of(name)) for name in PACKAGES)


def pages_of(package: str) -> list[PageMade]:
    """Return the pages of a package's names, and of its further names."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in (*public_paths(package), *further_paths(package)):
        modules[module_of(path)].append(path)
    return sorted(page_of_names(module, paths) for module, paths in modules.items())


def public_paths(package: str) -> list[str]:
    """Return the import paths of a package's public names."""
    return [f"{package}.{name}" for name in importlib.import_module(package).__all__]


def further_paths(package: str) -> list[str]:
    """Return the import paths of a package's further names."""
    return [path for path in FURTHER if path.startswith(f"{package}.")]


def module_of(path: str) -> str:
    """Return the folder or module that has the page of a name, below `raydix`."""
    _, package, *rest = (path.rpartition(".")[0] if path in FURTHER else defined_in(path)).split(".")
    if package == "schemas" or rest == ["errors"]:
        module = f"{package}.{rest[0]}"
        return MERGED.get(module, module)
    return f"{package}.{rest[0]}" if len(rest) > 1 else package


def defined_in(path: str) -> str:
    """Return the module that defines a public name."""
    package, _, name = path.rpartition(".")
    value = resolve(path)
    module = str(getattr(value, "__module__", ""))
    if module.startswith(f"{package}."):
        return module
    below = [module for name, module in sorted(sys.modules.items()) if name.startswith(f"{package}.")]
    return next(module.__name__ for module in below if getattr(module, name, None) is value)


def page_of_names(module: str, paths: list[str]) -> PageMade:
    """Return the page of a module's or folder's names, which begins with its docstring."""
    title = TITLES.get(module, module.rpartition(".")[2].replace("_", " ").capitalize())
    introduction = "" if module in HAVE_LONG_DOCSTRINGS else docstring_of(importlib.import_module(f"raydix.{module}"))
    directives = [f"::: {path}\n{options_of(path)}" for path in paths]
    return PageMade(title, f"reference/{module}.md", "\n\n".join((f"# {title}", introduction, *directives)) + "\n")


def options_of(path: str) -> str:
    """Return the options of a name: its full path as the heading, or the members of bases that have no page."""
    if path in FURTHER:
        return "    options:\n      show_root_full_path: true\n"
    value = resolve(path)
    if not inspect.isclass(value) or issubclass(value, BaseModel):
        return ""
    public = [resolve(other) for package in PACKAGES for other in public_paths(package)]
    bases = [base for base in inspect.getmro(value) if base.__module__.startswith("raydix.") and base not in public]
    members = sorted({name for base in bases for name in vars(base) if not name.startswith("_")})
    return f"    options:\n      inherited_members: [{', '.join(members)}]\n" if members else ""


@cache
def resolve(path: str) -> Any:
    """Return the value of a public name."""
    package, _, name = path.rpartition(".")
    return getattr(importlib.import_module(package), name)


def names_page() -> PageMade:
    """Return the page that lists all names, each with the first paragraph of its docstring."""
    text = ["# Names", "All public names, by the package to import them from."]
    for package in PACKAGES:
        rows = [row_of_name(path, summary_of(resolve(path))) for path in public_paths(package)]
        text += [f"## {package}", docstring_of(importlib.import_module(package)), "\n".join((HEAD, *rows))]
    rows = [row_of_name(path, f"`{path.rpartition('.')[0]}`") for path in FURTHER]
    text += [
        "## In modules of their own",
        "They need an extra, or serve one kind of program.",
        "\n".join((HEAD, *rows)),
    ]
    return PageMade("Names", "reference/names.md", "\n\n".join(text) + "\n")


def row_of_name(path: str, meaning: str) -> str:
    """Return a row of a table: a name that leads to its place, and its meaning."""
    return row(f"[`{path.rpartition('.')[2]}`][{path}]", meaning)


def row(*cells: str) -> str:
    """Return a row of a table. A bar outside of inline code would end a cell."""
    escaped = (re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or "&#124;", cell) for cell in cells)
    return f"| {' | '.join(escaped)} |"


def summary_of(value: Any) -> str:
    """Return the first paragraph of a docstring, for a cell of a table; nothing for a type without one."""
    is_type = not (inspect.isclass(value) or callable(value))
    return "" if is_type else docstring_of(value).partition("\n\n")[0].replace("\n", " ")


def docstring_of(value: Any) -> str:
    """Return a docstring without its indentation."""
    return inspect.getdoc(value) or ""


def commands_page() -> PageMade:
    """Return the page of all commands: the texts of their `--help`, with a table for each group of options."""
    commands = typer.main.get_command(app)
    text = ["# Command line", str(commands.help), *texts_of(commands, "raydix", level=1), str(commands.epilog)]
    return PageMade("Command line", "reference/command_line.md", "\n\n".join(text) + "\n")


def texts_of(command: Any, name: str, level: int) -> Iterator[str]:
    """Yield the usage of a command, its arguments and options, and the help of all commands below it."""
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```"
    tables: dict[str, list[str]] = defaultdict(list)
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            tables[getattr(parameter, "rich_help_panel", None) or title].append(
                row(f"`{record[0]}`", record[1].replace("[", "\\[").replace("<", "&lt;"))
            )
    for title, rows in tables.items():
        yield "\n".join((f"| {title} | |\n|---|---|", *rows))
    for word, below in getattr(command, "commands", {}).items():
        yield f"{'#' * (level + 1)} {name} {word}"
        yield inspect.cleandoc(below.help or "")
        yield from texts_of(below, f"{name} {word}", level + 1)
