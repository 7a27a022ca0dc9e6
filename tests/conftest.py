"""What all tests share."""

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # only here: most runs should not wait for it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
