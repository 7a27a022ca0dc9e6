"""Random traffic: `MambaRadixCache` does what pages and a dictionary of states say, operation by operation."""

import pytest
from support.traffic.mamba import run_random_mamba_traffic

PAGE_SIZES = (1, 4, 16)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_operations_agree_with_the_reference_model(page_size: int) -> None:
    for seed in (0, 1, 2):  # states in chunks of 1, 2 and 24 tokens
        run_random_mamba_traffic(seed, page_size, num_operations=400)


@pytest.mark.long
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_100000_random_operations_agree_with_the_reference_model(page_size: int) -> None:
    for seed in range(10, 22):
        run_random_mamba_traffic(seed, page_size, num_operations=8_400)
