"""Random traffic: `RadixCache` does what a dictionary of page-prefixes says, operation by operation."""

import pytest
from support.more import more
from support.traffic.radix import run_random_traffic

PAGE_SIZES = (1, 4, 16)


@pytest.mark.parametrize("seed", [0, *more(1)])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_operations_agree_with_the_reference_model(page_size: int, seed: int) -> None:
    run_random_traffic(seed, page_size, num_operations=1000)


@pytest.mark.long
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_100000_random_operations_agree_with_the_reference_model(page_size: int) -> None:
    for seed in range(10, 20):
        run_random_traffic(seed, page_size, num_operations=10_000)
