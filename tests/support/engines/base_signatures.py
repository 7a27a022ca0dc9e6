"""The interface of vLLM's connectors, as `vllm_base.json` has recorded it, and as vLLM has it where it is installed."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TypedDict

RECORDED = Path(__file__).parent / "vllm_base.json"


class BaseMethod(TypedDict):
    parameters: list[str]
    abstract: bool
    kind: str  # "method", "property" or "classmethod"


def recorded() -> dict[str, BaseMethod]:
    methods: dict[str, BaseMethod] = json.loads(RECORDED.read_text())
    return methods


def read_from_vllm() -> dict[str, BaseMethod]:
    """Read the base class of the installed vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base

    found: dict[str, BaseMethod] = {}
    for name, value in vars(Base).items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, property):
            found[name] = {"parameters": ["self"], "abstract": False, "kind": "property"}
        elif isinstance(value, classmethod) or inspect.isfunction(value):
            function = value.__func__ if isinstance(value, classmethod) else value
            found[name] = {
                "parameters": list(inspect.signature(function).parameters),
                "abstract": name in Base.__abstractmethods__,
                "kind": "classmethod" if isinstance(value, classmethod) else "method",
            }
    return dict(sorted(found.items()))


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(read_from_vllm(), indent=1) + "\n")
