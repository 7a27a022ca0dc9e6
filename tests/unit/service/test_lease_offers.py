"""Offers run out by the cache's clock, which the tests set; an offer and its end in one tick have one outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.caches.clocked_sessions import TTL_S, Scene

from raydix.schemas import (
    AdoptRequest,
    AdoptResponse,
    ExtendRequest,
    ExtendResponse,
    GrantRequest,
    LeaseExpired,
    LeaseResponse,
    RevokeRequest,
    RevokeResponse,
    UnknownLease,
)

TIMEOUT_S = 0.5


@pytest.fixture
async def scene() -> Any:
    """Two sessions, and a lease that the first offers."""
    scene = Scene()
    scene.open("granter")
    scene.open("worker")
    scene.acquire("granter", "l")
    assert isinstance(grant(scene), LeaseResponse)
    yield scene
    scene.service.core.check_invariants()
    await scene.service.close()


def grant(scene: Scene, timeout_s: float | None = TIMEOUT_S) -> Any:
    return scene.execute("granter", GrantRequest(lease_id="l", offer_id="o", timeout_s=timeout_s))


def adopt(scene: Scene, offer_id: str = "o") -> Any:
    request = AdoptRequest(lease_id="l", granter="granter", granted_epoch="e", offer_id=offer_id)
    return scene.execute("worker", request)


def revoke(scene: Scene) -> Any:
    return scene.execute("granter", RevokeRequest(lease_id="l", offer_id="o"))


async def test_an_offer_is_good_until_its_last_moment(scene: Scene) -> None:
    scene.clock.now += TIMEOUT_S - 0.001
    assert isinstance(adopt(scene), AdoptResponse)
    assert scene.service.stats().grants_expired == 0


async def test_an_adoption_in_the_tick_of_the_end_comes_too_late(scene: Scene) -> None:
    scene.clock.now += TIMEOUT_S  # no timer has run yet

    assert isinstance(adopt(scene), LeaseExpired)

    assert scene.counts == (8, 0, 0)
    assert scene.service.stats().grants_expired == 1


async def test_a_revocation_in_the_tick_of_the_end_ends_nothing(scene: Scene) -> None:
    scene.clock.now += TIMEOUT_S

    assert revoke(scene) == RevokeResponse(ended=False)

    assert scene.counts == (8, 0, 0)


async def test_none_is_the_configured_time(scene: Scene) -> None:
    default_s = scene.service.config.leases.grant_timeout_s
    grant(scene, timeout_s=None)
    for _ in range(int(default_s / TTL_S) * 2):  # the granter is heard of meanwhile
        scene.clock.now += TTL_S / 2
        assert isinstance(scene.service.session("granter", "e").deadline, float)
        scene.service.session("worker", "e")
    scene.clock.now -= 0.5
    assert isinstance(adopt(scene), AdoptResponse)


async def test_time_in_which_the_cache_stood_still_does_not_count(scene: Scene) -> None:
    scene.clock.now += 5.0

    assert isinstance(adopt(scene), AdoptResponse)


async def test_a_granter_that_expires_takes_its_offer_with_it(scene: Scene) -> None:
    grant(scene, timeout_s=100)
    scene.clock.now += TTL_S / 2
    scene.service.session("worker", "e")
    scene.wait(TTL_S / 2)

    assert scene.counts == (6, 0, 2)
    assert isinstance(adopt(scene), LeaseExpired)
    assert not scene.service.core.leases.offers


async def test_a_timer_ends_what_no_session_adopts() -> None:
    scene = Scene()
    scene.service.offers._clock = asyncio.get_running_loop().time
    scene.open("granter")
    scene.acquire("granter", "l")
    grant(scene, timeout_s=0.02)

    async with asyncio.timeout(60):
        while scene.service.stats().grants_expired == 0:  # noqa: ASYNC110 -- counts have no event
            await asyncio.sleep(0.005)

    assert scene.counts == (8, 0, 0)
    await scene.service.close()


async def test_another_offers_id_adopts_nothing(scene: Scene) -> None:
    assert isinstance(adopt(scene, offer_id="p"), UnknownLease)
    assert isinstance(scene.execute("granter", ExtendRequest(lease_id="l", num_slots=3, known_pages=2)), ExtendResponse)
