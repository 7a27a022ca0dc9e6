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
        SettingsError: the file is not there, is no YAML, holds a value that is none, or names a key twice.
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
    except RecursionError:
        raise _too_deep(str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise SettingsError(f"{path}{where}: {getattr(error, 'problem', None) or error}") from None


def read_value(text: str, place: str) -> Any:
    """A value that is given as text, as YAML reads it.

    Raises:
        SettingsError: it is no YAML, or names a key twice; the message begins with `place`.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return None if node is None else _value_of(loader, node, place, "", f"{place}: line ")
    except RecursionError:
        raise _too_deep(place) from None
    except yaml.YAMLError:
        raise SettingsError(f"{place}: {text!r} is no YAML value", "quote it") from None


def _items(
    loader: yaml.SafeLoader, mapping: yaml.MappingNode, above: Key, sections: Collection[Key], path: Path
) -> Iterator[tuple[Key, Any, str]]:
    _check_keys(mapping, ".".join(above), f"{path}, line ")
    for key_node, node in mapping.value:
        key = (*above, str(key_node.value))
        place = f"{path}, line {key_node.start_mark.line + 1}"
        if key in sections and isinstance(node, yaml.MappingNode):
            yield key, {}, place
            yield from _items(loader, node, key, sections, path)
            continue
        value = _value_of(loader, node, place, ".".join(key), f"{path}, line ")
        if key in sections and value is not None:
            raise SettingsError(f"{place}: {'.'.join(key)} has keys of its own, not a value", "indent them below it")
        yield key, value, place


def _value_of(loader: yaml.SafeLoader, node: yaml.Node, place: str, name: str, line: str) -> Any:
    """What a node stands for; `line` begins the place of a line within it."""
    below, seen = [node], set[int]()
    while below:
        each = below.pop()
        if id(each) in seen:  # an alias
            continue
        seen.add(id(each))
        if isinstance(each, yaml.MappingNode):
            _check_keys(each, name, line)
            below += [value for _, value in each.value]
        elif isinstance(each, yaml.SequenceNode):
            below += each.value
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError) as error:  # what yaml's constructors make of a bad date or number
        raise SettingsError(f"{place}: no YAML value: {error}", "quote it, if it is a text") from None


def _check_keys(mapping: yaml.MappingNode, name: str, line: str) -> None:
    """Raise SettingsError if a key stands twice in a mapping; `line` begins the place of a line."""
    lines: dict[str, int] = {}
    for key_node, _ in mapping.value:
        key, number = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            full = f"{name}.{key}" if name else key
            raise SettingsError(f"{line}{number}: {full} stands on line {lines[key]} already", "keep one of them")
        lines[key] = number


def _too_deep(place: str) -> SettingsError:
    return SettingsError(f"{place}: nested too deeply", "no setting has more than three levels")
