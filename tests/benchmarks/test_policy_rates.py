"""The generated traffic is as described, and the service hits on it what the rules of the policies hit."""

from __future__ import annotations

from statistics import fmean, median, quantiles

import pytest
from benchmarks.policy_rates import figures
from benchmarks.returning_documents import NUM_PAGES, documents


@pytest.mark.parametrize(("further", "requests_a_document"), [(0.0, 1 + 2 / 3), (0.75, 1 + 2 / 3 / 0.25)])
def test_documents_come_back_after_gaps_of_all_lengths(further: float, requests_a_document: float) -> None:
    ends, gaps, sizes = dict[int, int](), list[float](), list[int]()
    num_requests = num_requested = 0
    for seed in range(4):
        ends.clear()
        for request in documents(500.0, seed, further):
            pages = request.hash_ids
            if pages[0] in ends:
                gaps.append(num_requested - ends[pages[0]])
            else:
                sizes.append(len(pages))
            num_requests += 1
            num_requested += len(pages)
            ends[pages[0]] = num_requested

    assert sum(sizes) == 4 * NUM_PAGES
    assert max(sizes) == 60
    assert fmean(sizes) == pytest.approx(34, abs=1)
    assert num_requests / len(sizes) == pytest.approx(requests_a_document, rel=0.08)
    low, _, high = quantiles(gaps, n=4)
    assert median(gaps) == pytest.approx(500, rel=0.1)
    assert 3 < high / low < 4.5, "e ** 1.35 is 3.9"


def test_the_service_hits_what_the_rules_hit() -> None:
    found = figures(quick=True)

    assert len(found) == 16
    assert [figure.line() for figure in found if figure.failed] == []
    assert all(figure.value > 20 for figure in found)
