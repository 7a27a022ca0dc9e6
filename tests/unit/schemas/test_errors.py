"""The errors of both packages: their tree, their data, and that they survive pickling."""

import copy
import pickle
from typing import Any

import pytest

from raydix import cache_core, schemas
from raydix.cache_core import CoreError, OutOfSlotsError
from raydix.cache_core import errors as core_errors
from raydix.schemas import CacheBusy, CacheError, LeaseOwner, PoolExhausted, StaleEpoch
from raydix.schemas import errors as service_errors


def subclasses(base: type[Exception]) -> list[type[Exception]]:
    found = [base]
    for each in base.__subclasses__():
        found += subclasses(each)
    return [each for each in found if each.__module__.startswith("raydix.")]


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "PoolExhausted": (6, 2, 1, 5, 3, False, "slots", (LeaseOwner(owner="a", leases=2, slots=4, oldest_s=7),), "t", 9),
    "StaleEpoch": ("e1", "e2"),
    "CacheBusy": ("1024 acquires wait already", 0.25),
    "OutOfSlotsError": (6, 2, 1, 8, "states", "t"),
}
EVERY_ERROR = [
    kind(*ARGUMENTS.get(kind.__name__, ("what went wrong",)))
    for kind in (*subclasses(CacheError), *subclasses(CoreError))
]

every_error = pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)


def dumps_by_value(error: Exception) -> bytes:
    from ray import cloudpickle  # only here: the import takes a while

    data: bytes = cloudpickle.dumps(error)
    return data


@every_error
@pytest.mark.parametrize("dumps", [pickle.dumps, dumps_by_value], ids=["pickle", "cloudpickle"])
def test_every_error_survives_pickling_with_all_it_carries(error: Exception, dumps: Any) -> None:
    back = pickle.loads(dumps(error))

    assert type(back) is type(error)
    assert back.args == error.args
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_a_shortage_says_what_is_short() -> None:
    assert str(OutOfSlotsError(6, 2, 1, 8)) == "needs 6 slots, but 2 are free and 1 evictable, of 8 in all"
    assert str(OutOfSlotsError(6, 2, 1, 8, "states", "t")) == (
        "needs 6 states of the share of tenant 't', but 2 are free and 1 evictable, of 8 in all"
    )


@every_error
def test_every_error_can_be_copied(error: Exception) -> None:
    assert vars(copy.deepcopy(error)) == vars(error)


@every_error
def test_every_error_keeps_its_arguments(error: Exception) -> None:
    assert type(error)(*error.args).args == error.args


def test_the_services_errors_are_the_closed_set_of_the_design() -> None:
    names = {each.__name__ for each in subclasses(CacheError)}

    assert names == {
        "CacheBusy",
        "CacheError",
        "CacheUnavailable",
        "ConfigMismatch",
        "InvalidRequest",
        "LeaseExpired",
        "PoolExhausted",
        "StaleEpoch",
        "UnknownLease",
    }
    assert {each.__bases__ for each in subclasses(CacheError)[1:]} == {(CacheError,)}


def test_every_error_is_public_where_it_lives() -> None:
    for package, module, base in (
        (schemas, service_errors, CacheError),
        (cache_core, core_errors, CoreError),
    ):
        for error in subclasses(base):
            assert error.__module__ == module.__name__
            assert getattr(package, error.__name__) is error


def test_every_error_says_when_it_is_raised() -> None:
    assert all(error.__doc__ for error in (*subclasses(CacheError), *subclasses(CoreError)))


def test_the_core_and_the_service_have_errors_of_their_own() -> None:
    assert not issubclass(CoreError, CacheError)
    assert not issubclass(CacheError, CoreError)


@pytest.mark.parametrize("name", ["InvalidKeyError", "SlotError", "LeaseRangeError"])
def test_wrong_values_are_value_errors_too(name: str) -> None:
    assert issubclass(getattr(cache_core, name), ValueError)


def test_an_exhausted_pool_tells_who_has_it_and_what_helps() -> None:
    error = PoolExhausted(6, 2, 1, 5, 3)

    assert (error.needed, error.free, error.evictable, error.held_slots, error.open_leases) == (6, 2, 1, 5, 3)
    assert error.can_ever_fit is True
    assert str(error) == (
        "needs 6 slots, but 2 are free and 1 evictable (5 held by 3 leases); "
        "release leases, raise timeout_s, or enlarge PoolConfig.num_slots"
    )


def test_an_exhausted_pool_names_the_owners_of_its_leases() -> None:
    owners = (
        LeaseOwner(owner="trainer", leases=2, slots=4, oldest_s=61.4),
        LeaseOwner(owner="node:17", leases=1, slots=1, oldest_s=0.2),
    )

    assert str(PoolExhausted(6, 2, 1, 5, 3, True, "slots", owners, None, 7)) == (
        "needs 6 slots, but 2 are free and 1 evictable (5 held by 3 leases, shared prefixes counted once: "
        "trainer 4 slots by 2 leases, up to 1 min old, "
        "node:17 1 slot by 1 lease, up to 0.2 s old; 7 kept for other tenants); "
        "release leases, raise timeout_s, or enlarge PoolConfig.num_slots"
    )


def test_an_exhausted_share_names_its_tenant() -> None:
    error = PoolExhausted(6, 2, 1, 5, 3, False, "slots", (), "noisy")

    assert str(error).startswith("needs 6 slots of the share of tenant 'noisy', but 2 are free")
    assert str(error).endswith("it can never fit: shorten the request or enlarge its cap_slots")


def test_what_can_never_fit_is_told_so() -> None:
    error = PoolExhausted(6, 2, 1, 5, 3, False)

    assert error.can_ever_fit is False
    assert "it can never fit" in str(error)
    assert "timeout_s" not in str(error)


def test_a_stale_epoch_names_both() -> None:
    error = StaleEpoch("e1", "e2")

    assert (error.request_epoch, error.cache_epoch) == ("e1", "e2")
    assert "epoch 'e1'" in str(error)
    assert "epoch 'e2'" in str(error)


def test_a_busy_cache_says_when_to_try_again() -> None:
    error = CacheBusy("1024 acquires wait already", 0.25)

    assert error.retry_after_s == 0.25
    assert str(error) == "1024 acquires wait already; try again in 0.25 s"


@pytest.mark.parametrize(("needed", "can_ever_fit"), [(1, True), (8, True), (9, False)])
def test_out_of_slots_knows_whether_an_empty_pool_would_do(needed: int, can_ever_fit: bool) -> None:
    error = OutOfSlotsError(needed, 2, 1, 8)

    assert (error.needed, error.free, error.evictable, error.capacity) == (needed, 2, 1, 8)
    assert error.can_ever_fit is can_ever_fit
