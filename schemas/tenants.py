"""Tenants: namespaces that have a floor or a cap of slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raydix.schemas.namespace import frame_namespace
from raydix.schemas.shown import brief


class TenantConfig(BaseModel):
    """The limits of one namespace: slots that it may hold, in the tree and by its leases. Others have no limits.

    Other namespaces evict none of the tenant's slots up to its floor. Slots that the tenant does not use, others may
    take. Only full slots count, neither window slots nor states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=256, description="the tenant's name in statistics and errors")
    extra_key: str | None = Field(default=None, description="its namespace, as in requests")
    lora_id: str | None = None
    cache_salt: str | None = None
    floor_slots: int = Field(default=0, ge=0, description="others evict none of its slots up to this number")
    cap_slots: int | None = Field(default=None, gt=0, description="it never holds more slots; None: no limit")

    @model_validator(mode="after")
    def _floor_below_cap(self) -> Self:
        if self.cap_slots is not None and self.floor_slots > self.cap_slots:
            raise ValueError(f"floor_slots ({self.floor_slots}) must not be above cap_slots ({self.cap_slots})")
        return self

    @model_validator(mode="after")
    def _namespace_can_be_framed(self) -> Self:
        frame_namespace(self.extra_key, self.lora_id, self.cache_salt)
        return self

    @property
    def namespace(self) -> str | None:
        """The framed key of the tenant's namespace."""
        return frame_namespace(self.extra_key, self.lora_id, self.cache_salt)


def check_tenants(tenants: Sequence[TenantConfig], num_slots: int, page_size: int) -> None:
    """Raise ValueError unless `tenants` can share a pool of `num_slots`."""
    for what in ("name", "namespace"):
        for value, count in Counter(getattr(tenant, what) for tenant in tenants).items():
            if count > 1:
                raise ValueError(f"{count} tenants have the same {what}: {brief(value)}")
    for tenant in tenants:
        if tenant.floor_slots % page_size or (tenant.cap_slots or 0) % page_size:
            raise ValueError(
                f"floor_slots and cap_slots of tenant {tenant.name!r} must be multiples of page_size ({page_size}), "
                f"not {tenant.floor_slots} and {tenant.cap_slots}"
            )
        if (tenant.cap_slots or 0) > num_slots:
            raise ValueError(
                f"cap_slots ({tenant.cap_slots}) of tenant {tenant.name!r} must not be above num_slots ({num_slots})"
            )
    floors = sum(tenant.floor_slots for tenant in tenants)
    if floors > num_slots:
        raise ValueError(f"the tenants' floors add up to {floors} slots, but num_slots is {num_slots}")
