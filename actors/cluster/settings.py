"""A cache's configuration from a YAML file, the environment and options. A later source overrides an earlier one.

    page_size: 16                   RAYDIX_PAGE_SIZE=16                   page_size=16
    pool:                           RAYDIX_POOL_NUM_SLOTS=65536           pool.num_slots=65536
      num_slots: 65536

The keys are the fields of `CacheConfig`, and `name`. Sizes may also be written as 1M, 1e6 or 8GiB, and those of the
tiers as 4x: see `raydix.actors.cluster.capacity`. Errors name the place of the wrong setting.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from raydix.actors.cluster.capacity import (
    DISK_OPTION,
    HOST_OPTION,
    read_bytes,
    read_capacity,
    read_disk,
    read_tier_capacity,
)
from raydix.actors.cluster.settings_file import Key, SettingsError, Sources, StandardInput, read_value, read_yaml
from raydix.schemas import CacheConfig, LayerShape, PoolConfig
from raydix.schemas.cache_name import check_cache_name
from raydix.schemas.config import TierSizes
from raydix.schemas.shown import cut, fault_text

DEFAULT_NAME = "kv"
_HOST_SLOTS: Key = ("host", "num_slots")
_LEAST: dict[Key, str] = {  # section that needs values -> example
    ("pool",): "pool.num_slots: 65536",
    ("host",): "host: {num_slots: 4x}",
    ("disk",): "disk: {path: /nvme/raydix, size: 1TiB}",
}
_PREFIX = "RAYDIX_"
_TYPO_SIMILARITY = 0.8  # an unknown variable as similar to a known one as this is an error


@dataclass(frozen=True)
class Settings:
    """The combined settings of a file, the environment and options."""

    name: str  # base name: the first cache is called `<name>-0`
    config: CacheConfig


def load_settings(path: Path | StandardInput | str | None = None, **sources: Unpack[Sources]) -> Settings:
    """Return the combined settings of a file, the environment and options.

    Args:
        path: a YAML file, or the standard input; None reads none.
        sources: the other sources.

    Raises:
        SettingsError: the file cannot be read, or a key or value is wrong; the message names the place.
    """
    tree, places = given_settings(path, **sources)
    try:
        name = check_cache_name(tree.pop("name", DEFAULT_NAME))
    except ValueError as error:
        raise SettingsError(f"{places['name',]}: name: {error}", "kv, for caches called kv-0, kv-1 and so on") from None
    _check_events(tree, places)
    _read_sizes(tree, places)
    try:
        _read_host_sizes(tree, places)
        _read_disk_sizes(tree, places)
        config = CacheConfig.model_validate(tree)
    except ValidationError as error:
        raise _explained(error, places, path) from None
    _check_disk_size(config, places)
    return Settings(name, config)


def given_settings(
    path: Path | StandardInput | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    options: Iterable[str] = (),
    name: str | None = None,
    host_capacity: str | None = None,
    disk: str | None = None,
    num_ranks: int = 1,
    defaults: Mapping[Key, Any] | None = None,
) -> tuple[dict[str, Any], dict[Key, str]]:
    """Return the values of the combined sources as they are given, as a tree, and the place of each.

    The arguments are those of `load_settings`.

    Raises:
        SettingsError: a source cannot be read, or a key is wrong.
    """
    tree: dict[str, Any] = {}
    places: dict[Key, str] = {}
    layers = (
        [(key, value, "the defaults") for key, value in (defaults or {}).items()],
        read_yaml(Path(path) if isinstance(path, str) else path, SECTIONS) if path is not None else (),
        _from_environment(os.environ if environ is None else environ),
        _from_options(options),
        [] if name is None else [(("name",), name, "--name")],
        [] if host_capacity is None else [(_HOST_SLOTS, host_capacity, HOST_OPTION)],
        [] if disk is None else _from_disk(disk, num_ranks),
    )
    for layer in layers:
        for key, value, place in layer:
            _merge(tree, key, value)
            places[key] = place
    return tree, places


def _check_events(tree: dict[str, Any], places: Mapping[Key, str]) -> None:
    """Refuse `events: yes`, which does not say which: YAML takes yes, on and true for one value."""
    if tree.get("events") is True:
        raise SettingsError(
            f"{places['events',]}: events must be full, slim or false, not true",
            "events: full, with token ids as vLLM's; or events: slim, for raydix fleet",
        )


def _read_sizes(tree: dict[str, Any], places: Mapping[Key, str]) -> None:
    """Replace the sizes of pools and tenants that are given as text, such as 1M, by their number of slots.

    They are rounded down to whole pages, or rows. A number stays as it is, and must be whole pages.
    """
    page_size, row = tree.get("page_size", 1), tree.get("max_seq_len")
    if not _is_positive(page_size) or not (row is None or _is_positive(row)):
        return  # the model refuses it
    run_len = row or page_size
    pool = tree.get("pool")
    if isinstance(pool, dict):
        tree["pool"] = pool = dict(pool)
        for field in ("num_slots", "num_swa_slots"):
            if isinstance(pool.get(field), str):
                token_bytes, unknown = _token_bytes(pool, run_len) if field == "num_slots" else (0, "give a number")
                place = _place(places, "pool", field)
                pool[field] = read_capacity(pool[field], place).num_tokens(run_len, token_bytes, unknown)
    if isinstance(tree.get("tenants"), list):
        tree["tenants"] = [
            _with_sizes(tenant, page_size, f"{places['tenants',]}: tenants.{number}")
            for number, tenant in enumerate(tree["tenants"])
        ]


def _read_host_sizes(tree: dict[str, Any], places: Mapping[Key, str]) -> None:
    """Replace the sizes of the host tier that are given as text, such as 64GiB or 4x, by their number of slots.

    They are rounded down to whole pages. Bytes are those of the records of a tier.

    Raises:
        SettingsError: a size is wrong.
        ValidationError: the settings are wrong without a host tier, so that its records are not known.
    """
    host = tree.get("host")
    if not isinstance(host, dict):
        return
    given = [field for field in ("num_swa_slots", "num_slots") if isinstance(host.get(field), str)]
    if not given:
        return
    config = CacheConfig.model_validate(tree | {"host": None, "disk": None})
    tree["host"] = host = dict(host)
    in_pool = {"num_slots": config.pool.num_slots, "num_swa_slots": config.pool.num_swa_slots or config.pool.num_slots}
    for field in given:
        capacity = read_tier_capacity(host[field], _place(places, "host", field), in_pool[field])
        token_bytes, unknown = 0, "give a number"
        if field == "num_slots" and capacity.is_bytes:
            token_bytes, of_others, unknown = _host_token_bytes(config, host)
            capacity = capacity._replace(number=max(0, capacity.number - of_others))
        host[field] = capacity.num_tokens(config.page_size, token_bytes, unknown)


def _read_disk_sizes(tree: dict[str, Any], places: Mapping[Key, str]) -> None:
    """Replace the sizes of the disk tier that are given as text, such as 1TiB or 4x, by numbers.

    Raises:
        SettingsError: a size is wrong.
        ValidationError: the settings are wrong without tiers.
    """
    disk = tree.get("disk")
    if not isinstance(disk, dict):
        return
    tree["disk"] = disk = dict(disk)
    given = [field for field in ("size", "num_slots", "num_swa_slots") if isinstance(disk.get(field), str)]
    for field in given:
        place = _place(places, "disk", field)
        if field == "size":
            disk[field] = read_bytes(disk[field], place)
            continue
        config = CacheConfig.model_validate(tree | {"host": None, "disk": None})
        in_pool = config.pool.num_slots if field == "num_slots" else config.pool.num_swa_slots or config.pool.num_slots
        capacity = read_tier_capacity(disk[field], place, in_pool)
        disk[field] = capacity.num_tokens(config.page_size, unknown="bytes are disk.size")


def _place(places: Mapping[Key, str], section: str, field: str) -> str:
    """Return the place of a size for an error: the option that gives it alone, or the source and the key."""
    place = places.get((section, field), places.get((section,), ""))
    return place if place in (HOST_OPTION, DISK_OPTION) else f"{place}: {section}.{field}"


def _check_disk_size(config: CacheConfig, places: Mapping[Key, str]) -> None:
    """Raise SettingsError if the bytes of a disk tier have no room for a record of each kind."""
    if config.disk is None or config.disk.size is None:
        return
    # This imports torch, which takes long.
    from raydix.actors.tiers.disk.disk_layout import disk_sizes

    try:
        disk_sizes(config)
    except ValueError as error:
        place = places.get(("disk", "size"), places.get(("disk",), "the settings"))
        raise SettingsError(f"{place}: {error}", "a larger size, such as 1TiB") from None


def _host_token_bytes(config: CacheConfig, host: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the bytes of a token of a host tier, those of window slots and states with a number of their own, and "".

    The bytes of a token include its share of the window slots and states that are in proportion to the pool's. If a
    token has no bytes, the third value is the reason.
    """
    # This imports torch, which takes long.
    from raydix.actors.memory.pool_shapes import layout_below

    pool = config.pool
    if not pool.has_tensors:
        return 0, 0, "the pool has no layers, so a token has no bytes"
    below = layout_below(config, TierSizes(config.page_size))
    token_bytes, of_others = Fraction(below.slot_bytes), 0
    in_proportion = {
        "num_swa_slots": (below.swa_slot_bytes, pool.num_swa_slots or pool.num_slots),
        "num_state_slots": (below.state_bytes, pool.num_state_slots),
    }
    for field, (num_bytes, in_pool) in in_proportion.items():
        if isinstance(number := host.get(field), int):
            of_others += number * num_bytes
        else:
            token_bytes += Fraction(in_pool * num_bytes, pool.num_slots)
    return math.ceil(token_bytes), of_others, ""


def _with_sizes(tenant: Any, page_size: int, place: str) -> Any:
    """Return a tenant with its sizes as numbers."""
    fields = ("floor_slots", "cap_slots")
    if not isinstance(tenant, dict) or not any(isinstance(tenant.get(field), str) for field in fields):
        return tenant
    unknown = "a tenant has a number of slots"
    return tenant | {
        field: read_capacity(tenant[field], f"{place}.{field}").num_tokens(page_size, unknown=unknown)
        for field in fields
        if isinstance(tenant.get(field), str)
    }


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _token_bytes(pool: Mapping[str, Any], run_len: int) -> tuple[int, str]:
    """Return the bytes of a token in a pool with such settings; or 0, and the reason why they are not known."""
    try:
        config = PoolConfig.model_validate({**pool, "num_slots": run_len, "num_swa_slots": None})
    except ValidationError:
        return 0, "the layers of the pool are not valid"
    if not config.has_tensors:
        return 0, "the pool has no layers, so pool.layers does not give the bytes of a token"
    of_others_alone = config.format == "opaque" and not config.slot_bytes
    if pool.get("num_swa_slots") is not None or config.num_state_slots or of_others_alone:
        return 0, "window slots and states take bytes of their own"
    if config.format == "opaque":
        return config.slot_bytes, ""
    item_bytes = int("".join(filter(str.isdigit, config.dtype.partition("_")[0]))) // 8
    return item_bytes * sum(math.prod(shape) for layer in config.layers for shape in layer.shapes), ""


def as_yaml(settings: Settings) -> str:
    """Return YAML from which `load_settings` makes the same settings; fields with their default are left out."""
    tree = {"name": settings.name, **settings.config.model_dump(mode="json", exclude_defaults=True)}
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None)


def _section(kind: Any) -> type[BaseModel] | None:
    """Return the model of a field with sub-fields, such as `pool`, or `ghost` if it is set; None for other fields."""
    kinds = (kind,) if get_origin(kind) is tuple else (kind, *get_args(kind))  # tenants are a list of values
    return next((model for model in kinds if isinstance(model, type) and issubclass(model, BaseModel)), None)


def _fields(model: type[BaseModel], above: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yield each field of a configuration and of its sections."""
    for name, field in model.model_fields.items():
        yield (*above, name), field
        if (section := _section(field.annotation)) is not None:
            yield from _fields(section, (*above, name))


_FIELDS = dict(_fields(CacheConfig))
_KINDS: dict[Key, Any] = {("name",): str, **{key: field.annotation for key, field in _FIELDS.items()}}
SECTIONS = frozenset(key for key, kind in _KINDS.items() if _section(kind) is not None)
_VARIABLES = {_PREFIX + "_".join(key).upper(): key for key in _KINDS}
_LEAVES = [variable for variable, key in _VARIABLES.items() if key not in SECTIONS]
_OTHER_VARIABLES = {"RAYDIX_NAMESPACE", "RAYDIX_TRACE", "RAYDIX_BENCH_GATE", "RAYDIX_PLAIN", "RAYDIX_CHANNEL"}


def _merge(tree: dict[str, Any], key: Key, value: Any) -> None:
    """Set a value and create its sections. A section given as `{}` keeps its fields."""
    for name in key[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    if key not in SECTIONS or value != {} or not isinstance(tree.get(key[-1]), dict):
        tree[key[-1]] = value


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Key, Any, str]]:
    for variable, text in sorted(environ.items()):
        if not variable.startswith(_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        place = f"environment variable {variable}"
        if (key := _VARIABLES.get(variable)) is not None:
            yield from _parsed(key, text, place)
        elif near := get_close_matches(variable, _LEAVES, 1, _TYPO_SIMILARITY):
            raise SettingsError(f"{cut(place)} is unknown", f"unset it, or set {near[0]}")


def _from_disk(text: str, num_ranks: int) -> Iterator[tuple[Key, Any, str]]:
    """Yield the path and the size that `--disk PATH:SIZE` names, and that no other size counts."""
    path, size = read_disk(text)
    yield ("disk", "path"), path, DISK_OPTION
    yield ("disk", "size"), size.number // num_ranks if size.is_bytes else None, DISK_OPTION
    yield ("disk", "num_slots"), None if size.is_bytes else size.text, DISK_OPTION


def _from_options(options: Iterable[str]) -> Iterator[tuple[Key, Any, str]]:
    for option in options:
        text_of_key, equals, text = option.partition("=")
        place = cut(f"--set {option}")
        if not equals:
            raise SettingsError(f"{place}: no value", f"{place}=VALUE")
        key = tuple(text_of_key.strip().split("."))
        if key not in _KINDS:
            raise SettingsError(f"{place}: no such key", _suggestion(key))
        yield from _parsed(key, text, place)


def _parsed(key: Key, text: str, place: str) -> Iterator[tuple[Key, Any, str]]:
    """Yield the value of a key given as text; for a section, each of its keys."""
    kind = _KINDS[key]
    if kind is str or (str in get_args(kind) and text != "null"):
        yield key, text, place  # a fingerprint may look like a number
        return
    value = read_value(text, place)
    if key not in SECTIONS or not isinstance(value, dict):
        yield key, value, place
        return
    yield key, {}, place
    for name, below in value.items():
        yield (*key, str(name)), below, place


def _explained(
    error: ValidationError, places: Mapping[Key, str], path: Path | StandardInput | str | None
) -> SettingsError:
    """Return the first of pydantic's errors, with the place of its value and advice."""
    errors = error.errors(include_url=False)
    # A misspelt key also counts as missing.
    first = next((fault for fault in errors if fault["type"] == "extra_forbidden"), errors[0])
    key = tuple(str(part) for part in first["loc"])
    place = next((places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places), str(path or "the settings"))
    what, advice = fault_text(first), ""
    if first["type"] == "extra_forbidden":
        what, advice = "no such key", _suggestion(key)
    elif first["type"] == "missing":
        text, variable = ".".join(key), _PREFIX + "_".join(key).upper()
        what, advice = "must be set", f"set {text} in a file given with -c, {variable}, or --set {text}=VALUE"
        if key in SECTIONS:
            advice = f"give at least {text}.num_slots: --set {text}.num_slots=65536"
    elif first["type"] != "value_error":
        advice = _example(key, first)
    return SettingsError(f"{place}: {cut('.'.join(key)) + ': ' if key else ''}{what}", advice)


def _example(key: Key, fault: Mapping[str, Any]) -> str:
    """Return a value that is near to a wrong one, or the field's meaning and default."""
    name, value = ".".join(key), fault["input"]
    if fault["type"] == "literal_error":
        known = [choice for choice in re.findall(r"'([^']*)'", fault["msg"]) if isinstance(value, str)]
        near = get_close_matches(str(value).lower(), known, 1, 0.5)
        return f"{name}: {near[0]}" if near else ""
    if key in SECTIONS and not isinstance(value, dict):
        return _LEAST.get(key, f"{name}: {{}}, for its defaults")
    if fault["type"].startswith("int_") and _whole_number(value) is not None:
        return f"{name}: {_whole_number(value)} (in YAML, {value} is a text)"
    field = _FIELDS.get(key)
    if field is None:
        return ""
    default = (
        f"{name}: 65536"
        if field.is_required()
        else f"{name}: {yaml.safe_dump(field.default).splitlines()[0]}, the default"
    )
    return "; ".join(filter(None, (default, field.description)))


def _whole_number(value: Any) -> int | None:
    """Return the number that a text such as 1e3 is meant to be."""
    try:
        number = float(value) if isinstance(value, str) and len(value) < 20 else math.nan
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number.is_integer() else None


def _suggestion(key: Key) -> str:
    """Return advice with the known key nearest to a wrong one."""
    if key[0] == "pool" and key[-1] in LayerShape.model_fields:
        return "pool.layers: [{count: 32, num_kv_heads: 8, head_dim: 128}]"
    named = {".".join(known): known for known in _KINDS}
    for text, known in named.items():
        if known[-1] == key[-1]:
            return f"{text}: {key[-1]} belongs there"
    near = get_close_matches(".".join(key), named, 1, 0.5) or get_close_matches(
        key[-1], [known[-1] for known in named.values()], 1, 0.5
    )
    if near:
        return f"{next((text for text in named if text == near[0] or text.endswith('.' + near[0])), near[0])}?"
    sections: dict[str, list[str]] = {}  # key of a section -> names of its fields
    for *above, name in named.values():
        sections.setdefault(".".join(above), []).append(name)
    lists = {section: ", ".join(names) for section, names in sections.items()}
    return "one of " + ", ".join(f"{section}.{{{names}}}" if section else names for section, names in lists.items())
