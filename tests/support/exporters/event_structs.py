"""The structs of vLLM's KV events: as `vllm_events.json` has recorded them, and of vLLM where it is installed."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, TypedDict

import msgspec

RECORDED = Path(__file__).parent / "vllm_events.json"
EVENTS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class RecordedStruct(TypedDict):
    tag: str | None
    array_like: bool
    omit_defaults: bool
    fields: dict[str, str]  # name and type, in order
    num_required: int


class RecordedFormat(TypedDict):
    structs: dict[str, RecordedStruct]
    end_of_replay: str


def recorded() -> RecordedFormat:
    """Return the recorded format."""
    found: RecordedFormat = json.loads(RECORDED.read_text())
    return found


def read_from_vllm() -> RecordedFormat:
    """Read the format of the installed vLLM."""
    from vllm.distributed import kv_events

    structs = {name: described(getattr(kv_events, name)) for name in (*EVENTS, "KVEventBatch")}
    return {"structs": structs, "end_of_replay": kv_events.ZmqEventPublisher.END_SEQ.hex()}


def described(struct: Any) -> RecordedStruct:
    """Describe a struct of msgspec. Of a field that is a list of events, it is a list of objects."""
    config = struct.__struct_config__
    types = typing.get_type_hints(struct) if struct.__module__.startswith("vllm") else struct.__annotations__
    fields = {name: _name_of(types[name]) for name in struct.__struct_fields__}
    if "events" in fields:
        fields["events"] = "list[object]"
    return {
        "tag": config.tag,
        "array_like": config.array_like,
        "omit_defaults": config.omit_defaults,
        "fields": fields,
        "num_required": len(struct.__struct_fields__) - len(struct.__struct_defaults__),
    }


def recorded_batch() -> Any:
    """Return the struct of a batch, made of what is recorded, for a decoder."""
    structs = recorded()["structs"]
    stored, removed, cleared = (_made(name, structs[name]) for name in EVENTS)
    return _made("KVEventBatch", structs["KVEventBatch"], events=list[stored | removed | cleared])


def _name_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _made(name: str, struct: RecordedStruct, **types: Any) -> Any:
    fields: list[Any] = []
    for place, (field, kind) in enumerate(struct["fields"].items()):
        typed = types.get(field) or eval(kind, {"typing": typing})
        fields.append((field, typed) if place < struct["num_required"] else (field, typed, None))
    return msgspec.defstruct(
        name, fields, tag=struct["tag"], array_like=struct["array_like"], omit_defaults=struct["omit_defaults"]
    )


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(read_from_vllm(), indent=1) + "\n")
