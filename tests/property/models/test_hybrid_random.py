"""Random traffic: a cache with a window and states does what both references together say, operation by operation."""

import pytest
from support.more import more
from support.traffic.hybrid import run_random_hybrid_traffic

WINDOWS = {1: (1, 3, 7), 4: (3, 6, 12), 16: (5, 20, 40)}  # within a page, across its edge, and over several
PAGES_AND_WINDOWS = [(page_size, window) for page_size, windows in WINDOWS.items() for window in windows]


QUICK = [(1, 3), (4, 6), (4, 12), (16, 20)]


@pytest.mark.parametrize(
    ("page_size", "window"), [*QUICK, *more(*(each for each in PAGES_AND_WINDOWS if each not in QUICK))]
)
def test_random_operations_agree_with_the_reference_model(page_size: int, window: int) -> None:
    for seed in (0, 3):  # with a pool that moves window halves, and with one that does not
        run_random_hybrid_traffic(seed, page_size, window, num_operations=200)


@pytest.mark.long
@pytest.mark.parametrize(("page_size", "window"), PAGES_AND_WINDOWS)
def test_100000_random_operations_agree_with_the_reference_model(page_size: int, window: int) -> None:
    for seed in range(10, 22):
        run_random_hybrid_traffic(seed, page_size, window, num_operations=2_800)
