"""`LMCacheServer`: LMCache's server in a process of its own, where LMCache is installed; vLLM's options to use it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from support.processes.ray_head import free_port
from support.waiting import wait_until

VERSION = "0.5.6"  # that was measured
INSTALL = f"{sys.executable} -m pip install -c constraints-engines.txt lmcache=={VERSION}"
_START_S = 180.0
_END_S = 30.0


def is_installed() -> bool:
    return find_spec("lmcache") is not None


class LMCacheServer:
    """A server of the engines on this machine. It has started when it is made.

    Args:
        log: where its output goes; it is appended.
        memory_gib: of its first level.
        disk: an existing folder for its second level, the adapter "fs"; None: it has none.
        chunk_size: tokens of an object; None: its default.
    """

    def __init__(
        self, log: Path, *, memory_gib: int = 4, disk: Path | None = None, chunk_size: int | None = None
    ) -> None:
        self.port = free_port()
        command = [str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--http-port", str(free_port()), "--prometheus-port", str(free_port())]
        command += ["--l1-size-gb", str(memory_gib), "--l1-init-size-gb", str(memory_gib), "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "auto", "--shm-name", f"lm{uuid4().hex[:8]}"]  # for engines on CPUs
        if disk is not None:
            command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(disk)})]
        if chunk_size is not None:
            command += ["--chunk-size", str(chunk_size)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        wait_until(self._answers, _START_S)

    def _answers(self) -> bool:
        assert self.process.poll() is None, "LMCache's server has ended; its log says why"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    @property
    def transfer(self) -> dict[str, Any]:
        """The options of an engine that uses it."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port},
        }

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)
