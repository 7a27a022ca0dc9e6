"""`EngineSettings`: the settings of a connector, from the engine's command line."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raydix.actors.cluster.rank_names import rank_name
from raydix.schemas import InvalidRequest
from raydix.schemas.shown import brief


class EngineSettings(BaseModel):
    """The settings of a connector: `kv_connector_extra_config` of vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    cache: str = Field(min_length=1, description="the cache's name; with tensor parallelism, rank r uses NAME-tp<r>")
    ray_address: str = Field(default="auto", description="address of a running Ray cluster; none is ever started")
    namespace: str = Field(default="raydix", description="the Ray namespace of the cache's actor")
    lookup_timeout_ms: float = Field(
        default=50,
        ge=0,
        description="a look-up without an answer is a miss after this, or after a tenth of the time that it can save; "
        "one that waits for a load is no miss until load_timeout_ms",
    )
    load_timeout_ms: float = Field(
        default=2000,
        gt=0,
        description="a request waits so long for a load from a tier below the pool; a load from the pool has failed if "
        "it has not begun by then, or if the cache has not confirmed its lease by then or 0.1 s after the copy",
    )
    reconnect_s: float = Field(default=1, gt=0, description="seconds between two attempts to reach the cache")
    max_waiting_leases: int = Field(default=64, ge=1, description="waiting requests that hold a lease at a time")
    weights: str = Field(default="", max_length=256, description="the label of the weights that the engine starts with")
    check: bool = Field(default=False, description="stamp saved pages and verify loaded ones; for tests")

    @classmethod
    def of(cls, given: dict[str, Any]) -> EngineSettings:
        """Return checked settings.

        Raises:
            InvalidRequest: a key is unknown or missing, or a value is wrong; the message names it.
        """
        if unknown := sorted(given.keys() - cls.model_fields.keys()):
            raise InvalidRequest(
                f"unknown setting {', '.join(map(brief, unknown))}: the settings are {', '.join(cls.model_fields)}"
            )
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"setting {name!r}: {first['msg']}, not {brief(given.get(name))}") from None

    def cache_of(self, rank: int, num_ranks: int) -> str:
        """Return the name of the cache of a rank."""
        return self.cache if num_ranks == 1 else rank_name(self.cache, rank)
