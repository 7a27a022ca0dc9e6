"""`raydix disk list` and `clear`: the records that caches have left on a disk of this machine."""

from __future__ import annotations

import json
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from raydix.actors.cli.failures import FAILED, USAGE, CommandError
from raydix.actors.cli.output import AsJson, show, table_of
from raydix.schemas.shown import NONE, brief, byte_size, counted, cut, short_time, shown

if TYPE_CHECKING:
    from raydix.actors.tiers.disk.disk_folder import FolderFacts
    from raydix.actors.tiers.disk.disk_list import DiskFacts, SpaceFacts

app = typer.Typer(no_args_is_help=True, help="Disk tiers of caches, on a disk of this machine.")

DiskPath = Annotated[Path, typer.Argument(metavar="PATH", help="The folder that caches have as disk.path.")]


@app.command("list")
def list_disk(path: DiskPath, as_json: AsJson = False) -> None:
    """List the disk tiers in a folder: caches, layouts, sizes, users, and the pages of each namespace and model.

    It needs no Ray cluster. Of a tier that a cache uses, the pages are not read: `raydix stats` prints them.
    """
    from raydix.actors.tiers.disk.disk_list import list_disks

    found = _read(path, list_disks)
    show([_as_json(facts) for facts in found], as_json, lambda: _tables(found, path))


@app.command()
def clear(
    path: DiskPath,
    name: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help='Only tiers of these caches, such as kv-0 or "chat-*". Default: of all.'),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Only tiers of this layout, as `list` prints it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Without it, nothing is removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove disk tiers in a folder with all their KV and token ids. Those that caches use are left alone.

    Their blocks are given back to the file system, which may keep their bytes until it uses them again.
    The exit status is 1 if a cache uses one that was to be removed.
    """
    from raydix.actors.tiers.disk.disk_folder import Cleared, list_folders
    from raydix.actors.tiers.disk.disk_folder import clear as clear_folders

    chosen = [
        folder
        for folder in _read(path, list_folders)
        if fnmatchcase(folder.cache, name or "*") and layout in (None, folder.layout)
    ]
    if chosen and not yes:
        text = ", ".join(f"{shown(folder.path)} ({byte_size(folder.num_bytes)})" for folder in chosen)
        raise CommandError(f"this removes {counted(len(chosen), 'disk tier')}: {text}", "the same with --yes", USAGE)
    done = Cleared([], [])
    for folder in chosen:
        part = clear_folders(str(path.absolute()), folder.cache, folder.layout)
        done.removed.extend(part.removed)
        done.in_use.extend(part.in_use)
    result = {
        "removed": [folder._asdict() for folder in done.removed],
        "in_use": [folder._asdict() for folder in done.in_use],
    }
    show(result, as_json, lambda: _sentences(done.removed, done.in_use, path))
    if done.in_use:
        raise typer.Exit(FAILED)


def _read(path: Path, read: Any) -> Any:
    """Return the result of `read` for a path.

    Raises:
        CommandError: it is no folder.
    """
    from raydix.schemas import CacheUnavailable

    try:
        return read(str(path.absolute()))
    except CacheUnavailable as error:
        raise CommandError(str(error), "give the folder that caches have as disk.path", USAGE) from error


def _sentences(removed: list[FolderFacts], in_use: list[FolderFacts], path: Path) -> str:
    lines = [f"{shown(folder.path)}: removed, {byte_size(folder.num_bytes)}" for folder in removed]
    lines += [f"{shown(folder.path)}: left alone, as it is in use{_user(folder)}" for folder in in_use]
    return "\n".join(lines) or f"no such disk tier lies in {shown(str(path))}"


def _user(folder: FolderFacts) -> str:
    return f" by pid {folder.pid}" if folder.pid is not None else " by another process"


# -------------------------------------------------------------------- facts as JSON and as tables


def _as_json(facts: DiskFacts) -> dict[str, Any]:
    layout = None if facts.layout is None else facts.layout._asdict() | {"description": _parts_of(facts)}
    spaces = None if facts.spaces is None else [_space_as_json(space) for space in facts.spaces]
    return facts.folder._asdict() | {"format": layout, "spaces": spaces, "fault": facts.fault}


def _parts_of(facts: DiskFacts) -> Any:
    assert facts.layout is not None
    try:
        return json.loads(facts.layout.description)
    except ValueError:
        return facts.layout.description


def _space_as_json(facts: SpaceFacts) -> dict[str, Any]:
    return facts.space._asdict() | {
        "namespace_label": _label_of(facts),
        "num_pages": facts.num_records.get("full", 0),
        "num_windows": facts.num_records.get("swa", 0),
        "num_states": facts.num_records.get("state", 0),
        "num_bytes": facts.num_bytes,
    }


def _label_of(facts: SpaceFacts) -> str:
    from raydix.actors.observe.namespace_hits import namespace_label

    try:
        return namespace_label(facts.space.namespace)
    except ValueError:  # a damaged name
        return brief(facts.space.namespace)


def _tables(found: list[DiskFacts], path: Path) -> Group | str:
    if not found:
        return f"no disk tier lies in {shown(str(path))}"
    now = time.time()
    tiers = table_of("cache", "layout", ">page", ">size", ">used", "in use")
    pages = table_of("cache", "layout", "namespace", "model", "weights", ">pages", ">size", ">since")
    for facts in found:
        folder = facts.folder
        tiers.add_row(
            shown(folder.cache),
            shown(folder.layout),
            NONE if facts.layout is None else f"{facts.layout.page_size}",
            byte_size(folder.num_bytes),
            f"{short_time(max(0.0, now - folder.used_at))} ago",
            _user(folder).strip() if folder.is_locked else NONE,
        )
        for part in facts.spaces or ():
            space = part.space
            pages.add_row(
                shown(folder.cache),
                shown(folder.layout),
                cut(_label_of(part)),
                cut(space.base + (f" + {space.adapter}" if space.adapter else "")) or NONE,
                cut(space.label) or NONE,
                f"{part.num_records.get('full', 0):,}",
                NONE if part.num_bytes is None else byte_size(part.num_bytes),
                f"{short_time(max(0.0, now - space.created))} ago",
            )
    notes = [f"{shown(facts.folder.path)}: {shown(facts.fault)}" for facts in found if facts.fault]
    return Group(tiers, *([pages] if pages.row_count else []), *notes)
