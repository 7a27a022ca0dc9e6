"""A YAML file as keys, values and their line numbers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import yaml
from yaml.composer import ComposerError

from raydix.schemas.shown import brief, counted, cut

Key = tuple[str, ...]


_FORM = "one `key: value` a line, keys of a section indented with spaces"
_MOST_BYTES = 2**20  # largest file
_MOST_DIGITS = 64  # longest number, its sign and exponent included


class SettingsError(ValueError):
    """A setting is wrong, or a settings file cannot be read. `advice` is the next step for the user."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message, advice)
        self.advice = advice

    def __str__(self) -> str:
        return str(self.args[0])


class Sources(TypedDict, total=False):
    """The sources of settings besides a file.

    Attributes:
        environ: variables, of which `RAYDIX_*` are read; the default takes this process's.
        options: "key=value", with dots in the key; the value is YAML.
        name: base name of the caches; it overrides the other sources. None takes theirs.
        host_capacity: `host.num_slots`, the size of the host tier; it overrides the other sources. None takes theirs.
        disk: PATH:SIZE, the path and the size of the disk tier; it overrides the other sources. None takes theirs.
        num_ranks: caches among which the bytes of `disk` are divided; by default 1.
        defaults: values by key, such as ("pool", "num_slots"); the other sources override them.
    """

    environ: Mapping[str, str]
    options: Iterable[str]
    name: str | None
    host_capacity: str | None
    disk: str | None
    num_ranks: int
    defaults: Mapping[Key, Any]


class StandardInput:
    """The standard input in the place of a settings file: it is read once, and may be opened again."""

    def __init__(self) -> None:
        self._data: bytes | None = None

    def open(self, mode: Literal["rb"]) -> BytesIO:
        """Return a file with the bytes of the input, at most one more than a settings file may have."""
        if self._data is None:
            self._data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        return BytesIO(self._data)

    def __str__(self) -> str:
        return "stdin"


def read_yaml(path: Path | StandardInput, sections: Collection[Key]) -> Iterator[tuple[Key, Any, str]]:
    """Yield each key of a file with its value and place, and the keys in `sections` one by one.

    Raises:
        SettingsError: the file is missing, larger than 1 MiB or not YAML, has an invalid value, or has a key twice.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SettingsError(f"{path}: longer than {counted(_MOST_BYTES, 'byte')}", "give the path of a YAML file")
        loader = _Loader(data.decode("utf-8"))
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError(f"{path}, line 1: must be a mapping", "write one `key: value` per line")
        yield from _items(loader, root, (), sections, path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8: {error.reason}", "give the path of a YAML file") from None
    except RecursionError:
        raise _too_deep(str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SettingsError(f"{path}{where}: {cut(problem)}", _FORM) from None


def read_value(text: str, place: str) -> Any:
    """Return the value of a text in YAML.

    Raises:
        SettingsError: the text is not YAML, or has a key twice; the message begins with `place`.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _value_of(loader, node, place, "", f"{place}: line ")
    except RecursionError:
        raise _too_deep(place) from None
    except yaml.YAMLError:
        raise SettingsError(f"{place}: {brief(text)} is not a YAML value", "quote it") from None


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without aliases and numbers in base 60: a short text of either can take long to load."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Make the next node; an alias is an error."""
        if self.check_event(yaml.AliasEvent):
            mark = cast(Any, self).peek_event().start_mark
            raise ComposerError(None, None, "aliases are not supported: write the value again", mark)
        return super().compose_node(parent, index)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Make an int or a float of a number's text."""
        text = self.construct_scalar(node)
        if ":" in text or len(text) > _MOST_DIGITS:
            raise ValueError(f"a number must have at most {_MOST_DIGITS} characters and no ':', not {brief(text)}")
        construct = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        return construct(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def _items(
    loader: yaml.SafeLoader,
    mapping: yaml.MappingNode,
    above: Key,
    sections: Collection[Key],
    path: Path | StandardInput,
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
            raise SettingsError(f"{place}: {'.'.join(key)} must have keys, not a value", "indent them below it")
        yield key, value, place


def _value_of(loader: yaml.SafeLoader, node: yaml.Node, place: str, name: str, line: str) -> Any:
    """Return the value of a node; `line` begins the place of a line in it."""
    below = [node]
    while below:
        inner = below.pop()
        if isinstance(inner, yaml.MappingNode):
            _check_keys(inner, name, line)
            below += [value for _, value in inner.value]
        elif isinstance(inner, yaml.SequenceNode):
            below += inner.value
    try:
        return loader.construct_object(node, deep=True)
    except (
        ValueError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:  # yaml raises them for bad dates and numbers
        raise SettingsError(f"{place}: not a YAML value: {cut(str(error))}", "quote it if it is a text") from None


def _check_keys(mapping: yaml.MappingNode, name: str, line: str) -> None:
    """Raise SettingsError if a mapping has a key twice; `line` begins the place of a line."""
    lines: dict[str, int] = {}
    for key_node, _ in mapping.value:
        number = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise SettingsError(f"{line}{number}: a key must be a text", "write `key: value`")
        key = str(key_node.value)
        if key in lines:
            full = cut(f"{name}.{key}" if name else key)
            raise SettingsError(f"{line}{number}: {full} is on line {lines[key]} already", "keep one of them")
        lines[key] = number


def _too_deep(place: str) -> SettingsError:
    return SettingsError(f"{place}: nested too deeply", "no setting has more than three levels")
