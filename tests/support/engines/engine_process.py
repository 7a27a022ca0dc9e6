"""`EngineProcess`: a vLLM engine in its own process tree, with answers as futures."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

DRIVER = Path(__file__).parent / "engine_driver.py"
TESTS = Path(__file__).parents[2]  # for classes that vLLM adds to its workers
START_S = 300.0
ANSWER_S = 200.0
_numbers = itertools.count(1)


class EngineProcess:
    """An engine. Making one returns immediately; the first answer waits for its start.

    Args:
        model: folder of the model.
        connector: settings of RaydixConnector; None: no connector.
        log: where its output goes.
        options: of vLLM's engine arguments.
    """

    def __init__(
        self,
        model: Path | str,
        connector: dict[str, Any] | None,
        log: Path,
        *,
        transfer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 2112,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "num_gpu_blocks_override": 400,
            "kv_cache_memory_bytes": 2**28,
            **options,
        }
        if connector is not None:
            given["kv_transfer_config"] = {
                "kv_connector": "RaydixConnector",
                "kv_connector_module_path": "raydix.actors.engines.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": connector,
                **(transfer or {}),
            }
        self.log = log
        self._futures: dict[int, Future[Any]] = {0: Future()}
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=environment,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            future = self._futures.pop(answer["number"])
            if "error" in answer:
                future.set_exception(RuntimeError(answer["error"]))
            else:
                future.set_result(answer["value"])
        for future in [*self._futures.values()]:
            if not future.done():
                future.set_exception(RuntimeError(f"the engine has ended:\n{self.tail()}"))

    def tail(self, length: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-length:]

    def wait_until_ready(self) -> EngineProcess:
        self._futures[0].result(START_S) if 0 in self._futures else None
        return self

    def send(self, verb: str, **arguments: Any) -> Future[Any]:
        number = next(_numbers)
        future: Future[Any] = Future()
        self._futures[number] = future
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"number": number, "verb": verb, **arguments}) + "\n")
        self.process.stdin.flush()
        return future

    def ask(self, verb: str, **arguments: Any) -> Any:
        self.wait_until_ready()
        return self.send(verb, **arguments).result(ANSWER_S)

    def submit(self, tokens: list[int], num_new: int = 1, name: str | None = None, **more: Any) -> Future[Any]:
        self.wait_until_ready()
        return self.send("generate", name=name or f"r{next(_numbers)}", tokens=tokens, num_new=num_new, **more)

    def answer(self, tokens: list[int], num_new: int = 1, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.submit(tokens, num_new, **more).result(ANSWER_S)
        return answer

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, as soon as no block is held for a save; the connector is not reset."""
        deadline = time.monotonic() + ANSWER_S
        while not self.ask("reset"):
            assert time.monotonic() < deadline, "blocks stay held"
            time.sleep(0.02)

    def pids(self, kind: str) -> list[int]:
        """Process ids of its children with this text in their name: "EngineCore", "Worker"."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each.pid for each in children if kind in " ".join([each.name(), *_title(each)])]

    def kill(self) -> None:
        """Kill all its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid)
            for each in [*tree.children(recursive=True), tree]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    os.kill(each.pid, signal.SIGKILL)
        self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError, OSError):
                self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _title(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
