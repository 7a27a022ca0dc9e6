"""How far the small twins of models are from one pass: a line of JSON for each, then the extremes of both groups.

PYTHONPATH=tests python -m support.models.twin_margins [--threads N] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from support.models.model_variants import NAMES, config_named
from support.models.model_zoo import NO_CONFIG

from raydix.actors.huggingface.forward_pass import ForwardPass, pad_token_id
from raydix.actors.huggingface.in_float64 import InFloat64
from raydix.actors.huggingface.model_check import TWIN_BOUND, ModelCheck, ModelFails
from raydix.actors.huggingface.small_twin import TwinUnavailable, build_twin, small_twin
from raydix.schemas import ConfigMismatch

__all__ = ["Margins", "margins_in", "margins_of"]

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Margins:
    """The outcome of the check of a model's twin.

    Attributes:
        traits: of the model; or the reason why it has none.
        right: the largest difference that counts as rounding, in standard deviations of the logits.
        wrong: the smallest one that does not; None: there is none.
    """

    traits: str
    right: float
    wrong: float | None


class MeasuredCheck(ModelCheck):
    """A check that keeps the differences."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.differences: list[float] = []

    def _is_rounding(self, off: float) -> bool:
        self.differences.append(off)
        return super()._is_rounding(off)


def margins_of(name: str) -> Margins:
    """Return the margins of a configuration of the zoo."""
    try:
        twin = small_twin(config_named(name))
        check = MeasuredCheck(ForwardPass(build_twin(twin), pad_token_id(twin)), twin, TWIN_BOUND)
    except TwinUnavailable as error:
        return Margins(str(error), 0, None)
    try:
        with InFloat64():
            found = check.traits()
        traits = f"{found.positions.name}, {found.cannot_share is None}, {found.has_own_cache}, {found.decodes_alike}"
    except (ModelFails, ConfigMismatch) as error:
        traits = str(error)
    right = max((off for off in check.differences if off <= TWIN_BOUND), default=0)
    return Margins(traits, right, min((off for off in check.differences if off > TWIN_BOUND), default=None))


def margins_in(environment: Mapping[str, str], names: Iterable[str], threads: int = 1) -> dict[str, Margins]:
    """Return the margins that another process with these variables finds."""
    done = subprocess.run(
        [sys.executable, "-m", "support.models.twin_margins", "--threads", str(threads), *names],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("name"): Margins(**line) for line in lines}


def main() -> None:
    """Print the margins of the named models, or of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.WARNING)  # transformers names the GPU kernels that are missing
    found = {}
    for name in arguments.names or (name for name in NAMES if name not in NO_CONFIG):
        found[name] = margins_of(name)
        print(json.dumps({"name": name, **asdict(found[name])}), flush=True)
    right = sorted((margins.right, name) for name, margins in found.items())
    wrong = sorted((margins.wrong, name) for name, margins in found.items() if margins.wrong is not None)
    print(f"right: at most {right[-3:]}; bound {TWIN_BOUND}; wrong: at least {wrong[:3]}")


if __name__ == "__main__":
    main()
