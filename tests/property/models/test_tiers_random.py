"""Random traffic on two tiers, with copies that end late, early or never, against two dictionaries of prefixes."""

from collections import Counter

import pytest
from support.traffic.tiers import Shape, TiersTraffic

SHAPES = [
    Shape(1),
    Shape(4),
    Shape(16, policy="slru"),
    Shape(1, host_pages=6),
    Shape(2, policy="2q"),
    Shape(1, window=3),
    Shape(4, window=6, host_pages=8),
    Shape(1, states=14),
    Shape(2, states=14, window=3),
]


def name_of(shape: Shape) -> str:
    kind = ("-states" if shape.states else "") + ("-window" if shape.window else "")
    return f"pages of {shape.page_size}, {shape.host_pages} on the host, {shape.policy}{kind}"


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_moves_agree_with_their_model(shape: Shape) -> None:
    done = sum((TiersTraffic(seed, shape).run(370) for seed in range(4)), Counter[str]())

    assert done["load"] > 3 and done["write"] > 20, "little has moved"
    assert done["whole"] and done["none"], "no move has failed"


@pytest.mark.more
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_moves_agree_with_their_model_for_long(shape: Shape) -> None:
    done = sum((TiersTraffic(seed, shape).run(2_250) for seed in range(5)), Counter[str]())

    assert done["partial"] and done["given up"] and done["retired"] and done["waits for another load"]
