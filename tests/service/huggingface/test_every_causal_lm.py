"""Every causal LM of transformers is served with the logits of one pass without a cache, or refused by name.

The survey asks two workers on one cache; see `support.models.model_survey`. The quick part asks models of each kind
once, the long part every model, with every page size and at every page boundary.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.models.model_survey import Outcome, survey, survey_refused
from support.models.model_table import PAGE_SIZES, PATH, Row, kind_of, rows_of
from support.models.model_variants import NAMES, VARIANTS, config_named
from support.models.model_zoo import MODEL_TYPES, NO_CONFIG
from support.models.quick_models import QUICK
from support.models.survey_cases import TOLERANCE, Tally
from support.more import more

from raydix.actors.huggingface.worker import Generation
from raydix.actors.sessions.admission import Admission
from raydix.cache_core import MambaPool
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.schemas import LeaseResponse

CUTS = (4, 20)  # of a prompt of 40 tokens: one within the windows of 12, one beyond
QUICKEST = ["llama, YaRN", "gemma4_text, shared KV", "falcon_h1", "xlstm", "bart"]
"""One model of each kind of cache, one without, and a refused one."""

MUST_BE_SERVED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), "radix"),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), "radix + window"),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), "mamba"),
    "bamba": "mamba",
    "gemma3n_text": "radix + window",
    "gemma4": "radix + window",
    "gemma4_text": "radix + window",
    "gemma4_text, shared KV": "radix + window",
    "lfm2": "radix",
    "lfm2, convolutions": "mamba",
    "lfm2_moe": "mamba",
    "lfm3": "mamba + window",
    "llama, YaRN": "radix",
    "llama, dynamic NTK": "radix",
    "nemotron_h": "mamba",
    "nemotron_h, M-*E": "mamba",
    "nemotron_h, M-M*-": "mamba",
    "phi3, longrope": "radix",
    "zaya": "mamba",
    "zaya, windows": "mamba + window",
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "openai-gpt"), "without a cache"),
}
"""Models that may be refused."""

ALL = [
    pytest.param(name, page_size, dtype, id=f"{name}-{page_size}-{dtype}".replace(" ", "_"))
    for name, dtype, page_size in product(NAMES, ("float32", "bfloat16"), PAGE_SIZES)
]


@pytest.fixture(scope="module")
def table() -> dict[str, Row]:
    return rows_of(PATH.read_text())


async def check(name: str, page_size: int, dtype: str, cuts: tuple[int, ...] | None, table: dict[str, Row]) -> None:
    outcome = await survey(config_named(name), page_size, getattr(torch, dtype), cuts)

    assert outcome.tally.faults == []
    assert all(off <= TOLERANCE for off in outcome.tally.worst.values())
    assert (outcome.tally.num_rows > 0) == (outcome.verdict != "refused")
    assert kind_of(outcome) == (
        "refused" if dtype == "bfloat16" and table[name].bfloat16 == "refused" else table[name].cache
    )


@pytest.mark.parametrize(
    "name",
    [*QUICKEST, *more(*(name for name in QUICK if name not in QUICKEST))],
    ids=lambda name: name.replace(" ", "_"),
)
async def test_models_of_each_kind_are_served_right_or_refused(name: str, table: dict[str, Row]) -> None:
    await check(name, 4, "float32", CUTS, table)


@pytest.mark.long
@pytest.mark.parametrize(("name", "page_size", "dtype"), ALL)
async def test_every_model_is_served_right_or_refused(
    name: str, page_size: int, dtype: str, table: dict[str, Row]
) -> None:
    await check(name, page_size, dtype, None, table)


@pytest.mark.parametrize("name", [*NO_CONFIG, "t5", "llava", "qwen2_vl", "mistral3", "no_such_model"])
async def test_a_model_without_a_tiny_configuration_is_refused_by_name(name: str) -> None:
    outcome = await survey_refused({"model_type": name})

    assert (outcome.verdict, outcome.tally.faults) == ("refused", [])
    assert name in outcome.reason


def test_the_table_has_every_type_of_the_installed_transformers(table: dict[str, Row]) -> None:
    assert list(table) == [*MODEL_TYPES, *VARIANTS]
    assert {row.cache for row in table.values()} == {
        *(f"{kind}{window}" for kind in ("radix", "mamba") for window in ("", " + window")),
        "without a cache",
        "refused",
    }


def test_a_model_that_can_be_served_is_not_refused(table: dict[str, Row]) -> None:
    assert {name: table[name].cache for name in MUST_BE_SERVED} == MUST_BE_SERVED


@pytest.mark.parametrize("name", [name for name, kind in MUST_BE_SERVED.items() if kind != "without a cache"])
def test_a_model_with_a_cache_is_within_its_bound_and_bit_for_bit_in_bfloat16(name: str, table: dict[str, Row]) -> None:
    assert float(table[name].float32) <= TOLERANCE
    assert table[name].bfloat16 == "same bits"


def test_only_models_that_no_worker_can_serve_are_refused(table: dict[str, Row]) -> None:
    """Only encoder-decoders, models that are not causal, and those that transformers cannot make here are refused."""
    reasons = ("is an encoder and a decoder", "is not causal", "transformers has no", "transformers cannot make")
    refused = {name: row.remark for name, row in table.items() if row.cache == "refused"}

    assert {name: why for name, why in refused.items() if not any(reason in why for reason in reasons)} == {}


# ---------------------------------------------------------------- planted faults


async def test_a_state_of_another_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaPool, "copy_states", lambda states, src, dst: None)

    outcome = await survey(config_named("falcon_h1"), 4, cuts=CUTS)

    assert any(fault.startswith("cuts: ") and fault.endswith("deviations off") for fault in outcome.tally.faults)


async def test_a_page_of_another_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = Admission.lease_response

    def misplaced(admission: Admission, lease: LeaseRecord) -> LeaseResponse:
        response = granted(admission, lease)
        if lease.prefix_len < 8:
            return response
        return replace(response, page_starts=response.page_starts[4:8] + response.page_starts[4:])

    monkeypatch.setattr(Admission, "lease_response", misplaced)

    outcome = await survey(config_named("llama"), 4, cuts=CUTS)

    assert any(fault.startswith("cuts: ") and fault.endswith("deviations off") for fault in outcome.tally.faults)


def test_a_model_that_reuses_nothing_counts_as_wrong() -> None:
    outcome = Outcome("served", "radix")
    outcome.tally.check("nothing was reused", outcome.tally.num_hits > 0)

    assert kind_of(outcome) == "wrong"


@pytest.mark.parametrize(
    ("shift", "token", "faults"),
    [(0.5 * TOLERANCE, 3, 0), (2 * TOLERANCE, 3, 1), (0.0, 2, 1), (float("nan"), 3, 1)],
    ids=["within", "off", "token", "nan"],
)
def test_a_difference_beyond_the_tolerance_is_a_fault(shift: float, token: int, faults: int) -> None:
    expected = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 4.0]])
    found = Generation(
        token_ids=(token,),
        prefix_len=0,
        num_computed=2,
        time_to_first_token_s=0,
        total_s=0,
        logits=expected + shift * expected.std(),
    )
    tally = Tally()

    tally.compare("case", found, expected, 2)

    assert len(tally.faults) == faults, tally.faults
