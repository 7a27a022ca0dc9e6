"""Write `examples/models.md`: the survey's result for each causal LM of transformers, as a table.

PYTHONPATH=tests python -m support.models.model_table > examples/models.md
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from support.models.model_survey import Outcome, survey, survey_refused
from support.models.model_variants import VARIANTS, config_named
from support.models.model_zoo import MODEL_TYPES, NO_CONFIG
from support.models.survey_cases import Prompts

__all__ = ["PAGE_SIZES", "PATH", "Row", "kind_of", "rows_of"]

PATH = Path(__file__).parents[3] / "examples/models.md"
PAGE_SIZES = (1, 4, 16)
LONGEST_REASON = 220  # characters

INTRODUCTION = f"""\
# Models that `TransformersWorker` serves

For worker authors.

Each causal LM of transformers {transformers.__version__} was made with a tiny random configuration and ran on a CPU
with torch {torch.__version__.partition("+")[0]} and pages of {", ".join(map(str, PAGE_SIZES))} tokens.
Two workers shared a cache: one wrote the KV that the other one read. The requests had
prefixes of each number of pages, prompts beyond the sliding window, further turns, repeated tokens, pad tokens
inside the prompt, and a cache so small that it evicts.

- **cache**: the `kind` of `CacheConfig` that serves the model, "+ window" with `sliding_window_size`.
  *without a cache*: a worker with `use_cache=False` serves it, and a worker with a cache is refused.
  *refused*: `ConfigMismatch` when the worker is made or opened.
- **float32**: the largest difference of a logit from one pass without a cache, in standard deviations of the logits.
  The tests allow 0.005, and require the same tokens.
- **bfloat16**: the largest difference from the model's own cache, cut at the same places. *same bits*: no difference.
  *refused*: transformers cannot run it in bfloat16.
- **remark**: why there is no cache, in the words of the `ConfigMismatch`, or a special case.
  Where decoding differs from a prefill, a worker publishes prompts alone, so answers are computed again.

`make models` makes this page again. `tests/service/huggingface/test_every_causal_lm.py` checks the table.
"""
HEAD = "| {} | cache | float32 | bfloat16 | remark |\n|---|---|---|---|---|"
VARIANTS_TITLE = """
## Other configurations

The table above has the defaults of each type. These have other ropes, layers or switches.
"""


def kind_of(outcome: Outcome) -> str:
    """Return the cell of the column `cache`."""
    if outcome.tally.faults:
        return "wrong"
    return {"served": outcome.kind, "served without a cache": "without a cache"}.get(outcome.verdict, "refused")


class Row(NamedTuple):
    """The cells of a model."""

    cache: str
    float32: str
    bfloat16: str
    remark: str


def rows_of(page: str) -> dict[str, Row]:
    """Return the rows of a page made here, by the model's name, in order."""
    lines = re.findall(r"^\| `(.+?)` \| (.*) \|$", page, flags=re.MULTILINE)
    return {name: Row(*cells.split(" | ")) for name, cells in lines}


async def _row(name: str) -> str:
    if name in NO_CONFIG:
        outcome = await survey_refused({"model_type": name})
        return _line(name, Row(kind_of(outcome), "", "", _short(outcome.reason)))
    config = config_named(name)
    fine = [await survey(config, page_size) for page_size in PAGE_SIZES]
    outcome = fine[0]
    if outcome.verdict == "refused":
        return _line(name, Row(kind_of(outcome), "", "", _short(outcome.reason)))
    coarse = [await survey(config, page_size, torch.bfloat16) for page_size in PAGE_SIZES]
    worst = next((each for each in (*fine, *coarse) if each.tally.faults), outcome)
    remarks = [_short(outcome.reason)] if outcome.reason else []
    prompts = Prompts(config)
    if prompts.pad is not None and not prompts.may_pad:
        remarks.append("not asked with pads, to which its indexer gives equal scores")
    if not outcome.decodes_alike:
        remarks.append("decoding differs from a prefill in transformers: its logits are those of the model's own cache")
    if near_ties := sum(each.tally.near_ties for each in fine):
        remarks.append(f"{near_ties} generated tokens as likely as others")
    remarks += map(_short, worst.tally.faults[:1])
    return _line(name, Row(kind_of(worst), _largest(fine), _largest(coarse), "; ".join(remarks)))


def _largest(outcomes: list[Outcome]) -> str:
    if outcomes[0].verdict == "refused":
        return "refused"
    largest = max(outcome.tally.largest for outcome in outcomes)
    return "same bits" if largest == 0 else f"{largest:.0e}"


def _line(name: str, row: Row) -> str:
    return "| " + " | ".join((f"`{name}`", *row)) + " |"


def _short(reason: str) -> str:
    text = " ".join(reason.replace("|", "/").split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


async def main() -> None:
    """Print the page, and each row's name to the standard error."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # transformers names the GPU kernels that are missing
    print(INTRODUCTION)
    for title, names in (("type", MODEL_TYPES), ("configuration", tuple(VARIANTS))):
        if names is not MODEL_TYPES:
            print(VARIANTS_TITLE)
        print(HEAD.format(title))
        for name in names:
            print(name, file=sys.stderr)
            print(await _row(name), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
