"""`LayerShape`: the KV, or the recurrent state, of a layer of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

MAX_LAYERS = 4096  # of a pool

LayerKind: TypeAlias = Literal["full", "swa", "state"]


class LayerShape(BaseModel):
    """A layer of a pool: K and V of all tokens, K and V of a sliding window, or a recurrent state.

    In the list that is given to `PoolConfig.layers`, one with a `count` stands for as many layers. The list of the
    `PoolConfig` has each layer, with a count of 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    count: int = Field(default=1, ge=1, le=MAX_LAYERS, description="layers of this shape, one after the other")
    kind: LayerKind = Field(
        default="full", description="full: KV of all tokens; swa: of a sliding window; state: a recurrent state"
    )
    num_kv_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0, description="elements of one head's K")
    v_head_dim: int | None = Field(default=None, ge=0, description="elements of one head's V; None: as K")
    index_head_dim: int = Field(
        default=0,
        ge=0,
        description="elements of a token's index key, which sparse attention keeps with K and V; 0: none",
    )
    state_shapes: tuple[tuple[Annotated[int, Field(ge=1)], ...], ...] = Field(
        default=(), description="state: the shapes of its tensors"
    )

    @field_validator("v_head_dim")
    @classmethod
    def _none_is_as_k(cls, v_head_dim: int | None, given: ValidationInfo) -> int | None:
        return None if v_head_dim == given.data.get("head_dim") else v_head_dim

    @model_validator(mode="after")
    def _has_the_shapes_of_its_kind(self) -> Self:
        if self.kind == "state":
            of_kv = ("num_kv_heads", "head_dim", "v_head_dim", "index_head_dim")
            if given := [name for name in of_kv if getattr(self, name)]:
                raise ValueError(f"a state layer keeps state_shapes alone: leave out {given[0]}")
            if not self.state_shapes:
                raise ValueError("a state layer needs state_shapes")
        elif not (self.num_kv_heads and self.head_dim):
            raise ValueError("a layer that keeps KV needs num_kv_heads and head_dim of at least 1")
        elif self.state_shapes:
            raise ValueError("state_shapes is for layers of kind 'state': leave it out")
        return self

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a token's K, V and, if it has any, index key; or of the tensors of a state."""
        if self.kind == "state":
            return self.state_shapes
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        kv = (self.num_kv_heads, self.head_dim), (self.num_kv_heads, v_head_dim)
        return (*kv, (self.index_head_dim,)) if self.index_head_dim else kv

    def __str__(self) -> str:
        if self.kind == "state":
            return f"state: {list(self.state_shapes)}"
        dims = f"{self.head_dim}" if self.v_head_dim is None else f"{self.head_dim} + {self.v_head_dim}"
        index = f" with index keys of {self.index_head_dim}" if self.index_head_dim else ""
        return f"{self.kind}: {self.num_kv_heads} KV heads of {dims}{index}"


def each_layer(entries: Sequence[LayerShape]) -> tuple[LayerShape, ...]:
    """Return the layers for which entries stand, each with a count of 1; raise ValueError if they are too many."""
    if (number := sum(entry.count for entry in entries)) > MAX_LAYERS:
        raise ValueError(f"must be at most {MAX_LAYERS:,} layers, not {number:,}")
    return tuple(layer for entry in entries for layer in (entry.model_copy(update={"count": 1}),) * entry.count)


def in_runs(layers: Sequence[LayerShape]) -> list[dict[str, Any]]:
    """Return the fields of layers without defaults. Layers alike that follow one another are one entry with a count."""
    runs = ((layer, sum(1 for _ in run)) for layer, run in groupby(layers))
    return [layer.model_copy(update={"count": n}).model_dump(exclude_defaults=True) for layer, n in runs]


Layers = Annotated[tuple[LayerShape, ...], AfterValidator(each_layer), PlainSerializer(in_runs)]
