"""A Ray cluster of one process group, apart from the tests' own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory


@contextmanager
def ray_head(**environ: str) -> Iterator[str]:
    """Start a head node with more variables in its environment; yield the cluster's address."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        start = (
            f"start --head --block --port {port} --temp-dir {folder} --num-cpus 0 --num-gpus 0 --disable-usage-stats"
        )
        memory = "--include-dashboard false --object-store-memory 80000000".split()
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *start.split(), *memory],
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert head.stdout is not None
        for line in head.stdout:  # ends with the process
            if "will now block" in line:
                break
        yield f"127.0.0.1:{port}"
        head.terminate()
        head.wait()
