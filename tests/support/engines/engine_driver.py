"""A vLLM engine in a process of its own, which takes commands as JSON lines. Run by `engine_process.EngineProcess`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import psutil
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot


class Driver:
    """The engine, and its requests by id."""

    def __init__(self, engine: AsyncLLM, out: Any) -> None:
        self.engine = engine
        self.out = out
        self.tasks: set[asyncio.Task[None]] = set()

    def reply(self, number: int, **answer: Any) -> None:
        self.out.write(json.dumps({"number": number, **answer}) + "\n")
        self.out.flush()

    def start(self, command: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self.run(command))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self, command: dict[str, Any]) -> None:
        number, verb = command.pop("number"), command.pop("verb")
        try:
            self.reply(number, value=await getattr(self, verb)(**command))
        except Exception as error:
            self.reply(number, error=f"{type(error).__name__}: {error}")

    async def generate(
        self,
        name: str,
        tokens: list[int],
        num_new: int,
        salt: str | None = None,
        lora: list[Any] | None = None,
        logprobs: int = 1,
    ) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, logprobs=logprobs)
        prompt: Any = {"prompt_token_ids": tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        request = LoRARequest(*lora) if lora is not None else None
        began, times, results = time.monotonic(), [], []
        async for result in self.engine.generate(prompt, params, name, lora_request=request):
            times.append(time.monotonic() - began)
            results = [result]
        if not results:
            return {"tokens": [], "finish": "abort"}
        (last,) = results
        output = last.outputs[0]
        return {
            "tokens": list(output.token_ids),
            "logprobs": [
                each[chosen].logprob for each, chosen in zip(output.logprobs or [], output.token_ids, strict=False)
            ],
            "top": [{str(key): value.logprob for key, value in each.items()} for each in output.logprobs or []],
            "cached": last.num_cached_tokens,
            "times": times,
            "finish": output.finish_reason,
        }

    async def abort(self, names: list[str]) -> None:
        await self.engine.abort(names)

    async def abort_later(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.engine.abort(name)

    async def reset(self, connector: bool = False) -> bool:
        return bool(await self.engine.reset_prefix_cache(reset_connector=connector))

    async def reset_running(self) -> bool:
        return bool(await self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    async def pause(self) -> None:
        await self.engine.pause_generation(clear_cache=False)

    async def resume(self) -> None:
        await self.engine.resume_generation()

    async def rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        await self.engine.collective_rpc(method, kwargs=kwargs)

    async def log_stats(self) -> None:
        await self.engine.do_log_stats()

    async def metrics(self) -> dict[str, float]:
        await asyncio.sleep(0)
        return {each.name: each.value for each in get_metrics_snapshot() if hasattr(each, "value")}

    async def processes(self) -> dict[str, int]:
        found = {}
        for process in psutil.Process().children(recursive=True):
            found[process.name()] = process.pid
        return found


async def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output must not stand between the answers
    options = json.loads(sys.argv[1])
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    driver = Driver(engine, out)
    driver.reply(0, value="ready")
    reader = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        driver.start(json.loads(line))
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
