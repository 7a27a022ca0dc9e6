"""A YAML file as keys, values and the lines on which they stand."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

Key = tuple[str, ...]


class SettingsError(ValueError):
    """A setting is wrong, or a file of them cannot be read. `advice` says what to do."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message, advice)
        self.advice = advice

    def __str__(self) -> str:
        return str(self.args[0])


def read_yaml(path: Path, sections: Collection[Key]) -> Iterator[tuple[Key, Any, str]]:
    """Every key of a file with its value and place; those below `sections` one by one.

    Raises:
        SettingsError: the file is not there, is no YAML, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError(f"{path}, line 1: not a mapping", "write one `key: value` per line")
        yield from _items(loader, root, (), sections, path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8: {error.reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise SettingsError(f"{path}{where}: {getattr(error, 'problem', None) or error}") from None


def _items(
    loader: yaml.SafeLoader, mapping: yaml.MappingNode, above: Key, sections: Collection[Key], path: Path
) -> Iterator[tuple[Key, Any, str]]:
    lines: dict[Key, int] = {}
    for key_node, node in mapping.value:
        key, line = (*above, str(key_node.value)), key_node.start_mark.line + 1
        place = f"{path}, line {line}"
        if key in lines:
            raise SettingsError(f"{place}: {'.'.join(key)} stands on line {lines[key]} already", "keep one of them")
        lines[key] = line
        if key in sections and isinstance(node, yaml.MappingNode):
            yield key, {}, place
            yield from _items(loader, node, key, sections, path)
            continue
        value = loader.construct_object(node, deep=True)
        if key in sections and value is not None:
            raise SettingsError(f"{place}: {'.'.join(key)} has keys of its own, not a value", "indent them below it")
        yield key, value, place
