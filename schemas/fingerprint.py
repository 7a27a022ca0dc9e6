"""`ModelFingerprint`: which model computes KV; the requests that bind sessions and name weights; their responses."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from raydix.schemas.message import PydanticAnswer, PydanticMessage
from raydix.schemas.namespace import MAX_FIELD_LENGTH
from raydix.schemas.shown import brief, cut

MAX_FIELDS = 1024
MAX_NAME = 256  # characters
MAX_TEXT = 1024  # characters
_MOST_SHOWN = 8  # differing fields in one message
_LARGEST = 2**64
_ABSENT = object()

FieldValue = str | int | float | bool | None


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{brief(text)} is not valid Unicode text") from None
    return text


def _checked_fields(fields: Any) -> dict[str, FieldValue]:
    """Return a copy of the fields, sorted by name, with plain Python values."""
    if not isinstance(fields, dict):
        raise ValueError(f"must be a dict of values by name, not {type(fields).__name__}")
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"at most {MAX_FIELDS} fields, not {len(fields)}: pass a digest of some")
    for name in fields:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"a name must be a str of 1 to {MAX_NAME} characters, not {brief(name)}")
        _encodable(name)
    return {str(name): _plain(name, fields[name]) for name in sorted(fields)}


def _plain(name: str, value: Any) -> FieldValue:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _LARGEST:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and len(value) <= MAX_TEXT:
        return str(_encodable(value))
    kinds = f"a str of at most {MAX_TEXT} characters, an int of at most 64 bits, a finite float, a bool or None"
    raise ValueError(f"{brief(name)} must be {kinds}, not {brief(value)}")


Fields = Annotated[dict[str, Any], BeforeValidator(_checked_fields)]
Checksum = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_encodable)]
Label = Annotated[str, Field(min_length=1, max_length=MAX_NAME, strict=True), AfterValidator(_encodable)]
LoraId = Annotated[str, Field(max_length=MAX_FIELD_LENGTH), AfterValidator(_encodable)]


class ModelFingerprint(PydanticMessage):
    """The model that computes KV: workers of equal fingerprints compute the same KV for the same tokens.

    `raydix.actors.huggingface.worker.model_fingerprint(model)` makes one of a transformers model. Workers of other
    engines make their own: `ModelFingerprint(fields={"model": "toy", "rope_theta": 1e4}, weights="v17")`. As text, it
    is a hash of 16 characters.
    """

    model_config = ConfigDict(revalidate_instances="always")  # its dict could have been changed since

    fields: Fields = Field(repr=False, description="the configuration, by name: texts, numbers, bools and None")
    weights: Checksum = Field(description="a checksum, a version or a label of all weights; empty: they have no name")

    def __str__(self) -> str:
        fields = json.dumps({name: _canonical(value) for name, value in sorted(self.fields.items())})
        return hashlib.sha256(f"{fields}\n{self.weights}".encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(str(self))

    def differences(self, other: ModelFingerprint) -> tuple[str, ...]:
        """Return the names of the fields that differ, sorted; ("weights",) if only the weights do; () if none does."""
        names = sorted(self.fields.keys() | other.fields.keys())
        differing = [name for name in names if self.fields.get(name, _ABSENT) != other.fields.get(name, _ABSENT)]
        if not differing and self.weights != other.weights:
            return ("weights",)
        return tuple(differing)

    def difference(self, other: ModelFingerprint) -> str:
        """Return the `differences` with both values, as text of bounded length; empty if there are none."""
        names = self.differences(other)
        if names == ("weights",):
            return "the weights differ"
        shown = [f"{cut(name)} is {self._shown(name)}, not {other._shown(name)}" for name in names[:_MOST_SHOWN]]
        more = [f"and {len(names) - _MOST_SHOWN} more fields"] if len(names) > _MOST_SHOWN else []
        return "; ".join(shown + more)

    def _shown(self, name: str) -> str:
        return brief(self.fields[name]) if name in self.fields else "absent"


def _canonical(value: FieldValue) -> FieldValue:
    """Return one form of values that Python calls equal, such as True, 1 and 1.0."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


class BindModelRequest(PydanticMessage):
    """Bind this session to the model that computes the KV of a `lora_id`; None: of the base model."""

    fingerprint: ModelFingerprint
    lora_id: LoraId | None = None


class BindModelResponse(PydanticAnswer):
    """The session is bound."""

    generation: int = Field(description="of that `lora_id`; the cache uses each number once")


class SetWeightsRequest(PydanticMessage):
    """Begin the next generation of the base and of every `lora_id`, unless the base has this label already."""

    label: Label


class WeightsRequest(PydanticMessage):
    """Ask for the label of the base's weights."""


class WeightsResponse(PydanticAnswer):
    """The weights of the base model's generation."""

    label: str | None = Field(
        description="of `set_weights`, or of the first session that bound the base; None: none yet"
    )
    generation: int = Field(description="of the base; the cache uses each number once; 0: none has begun")
