"""Measure two vLLM engines with Raydix, without, and with LMCache's server where it is installed; all in turns.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python tests/engines/measure_vllm.py [--rounds 7] [--pairs 20] [--lmcache]

Time to first token of a prompt of 2,048 tokens: cold, and on the other instance. Then pairs of a miss and of decoding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from support.engines.engine_process import EngineProcess
from support.engines.laboratory import BLOCK, Laboratory, prompt, slot_bytes
from support.engines.lmcache_server import LMCacheServer

MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}  # about 86M parameters


def first_token(engine: EngineProcess, tokens: list[int]) -> float:
    return float(engine.answer(tokens, 1)["times"][0])


def step_time(engine: EngineProcess, tokens: list[int]) -> float:
    times = engine.answer(tokens, 65)["times"]
    return float(times[-1] - times[0]) / (len(times) - 1)


def median(times: list[float]) -> str:
    return f"{statistics.median(times):8.4f} s ({min(times):.4f} to {max(times):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lmcache", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    context = ray.init("local", num_cpus=2, include_dashboard=False, namespace="raydix")
    laboratory = Laboratory(context.address_info["gcs_address"], folder)
    cache = laboratory.start_cache(slot_bytes("llama", **MODEL), 16_384, check=False)
    model = laboratory.save_model("llama", **MODEL)
    engine_options: dict[str, Any] = {"num_gpu_blocks_override": 160, "kv_cache_memory_bytes": 2**30}
    settings = {"check": False}
    engines = {"none": [laboratory.start_engine(model, None, **engine_options)]}
    engines["none"][0].wait_until_ready()
    engines["raydix"] = [laboratory.start_engine(model, cache, settings=settings, **engine_options) for _ in range(2)]
    server = None
    if options.lmcache:
        server = LMCacheServer(folder / "lmcache.log", chunk_size=BLOCK)
        engines["lmcache"] = [
            laboratory.start_engine(model, "unused", transfer=server.transfer, **engine_options) for _ in range(2)
        ]
    for each in engines.values():
        for engine in each:
            engine.wait_until_ready()
            engine.answer(prompt(300, seed=int(time.time() * 1000) % 10**6), 4)
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)
        print(f"{name:28} {seconds:.4f}", flush=True)

    for number in range(options.rounds):
        tokens = prompt(options.length, seed=10_000 + number)
        note("cold, none", first_token(engines["none"][0], tokens))
        for name in [each for each in engines if each != "none"]:
            one, other = engines[name]
            note(f"cold, {name}", first_token(one, tokens))
            time.sleep(0.5)
            note(f"other instance, {name}", first_token(other, tokens))
    order = [*engines]
    for number in range(options.pairs):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            tokens = prompt(512, seed=20_000 + number)
            note(f"miss of 512, {name}", first_token(engines[name][0], tokens))
            note(f"decode, {name}", step_time(engines[name][0], prompt(60, seed=30_000 + number)))
    print()
    for name, each in sorted(times.items()):
        print(f"{name:28} {median(each)}")
    hits = [engine.ask("metrics").get("vllm:external_prefix_cache_hits", 0) for engine in engines["raydix"]]
    print(f"tokens hit, raydix: {hits}")
    laboratory.close()
    if server is not None:
        server.close()
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
