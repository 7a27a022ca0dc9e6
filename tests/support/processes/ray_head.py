"""A Ray cluster of one process group, apart from the tests' own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def ray_head(
    python: str | Path = sys.executable,
    num_cpus: int = 0,
    environ: Mapping[str, str] = os.environ,
    dashboard_port: int | None = None,
    **more: str,
) -> Iterator[str]:
    """Start a head node by an environment's Python, with more variables; yield the cluster's address.

    With a `dashboard_port` it takes jobs there.
    """
    with ray_head_in_folder(python, num_cpus, environ, dashboard_port, **more) as (address, _):
        yield address


@contextmanager
def ray_head_in_folder(
    python: str | Path = sys.executable,
    num_cpus: int = 0,
    environ: Mapping[str, str] = os.environ,
    dashboard_port: int | None = None,
    **more: str,
) -> Iterator[tuple[str, Path]]:
    """Start a head node as `ray_head` does; yield the cluster's address, and the folder of its files."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        port = free_port()
        start = f"start --head --block --port {port} --temp-dir {folder} --num-cpus {num_cpus} --num-gpus 0"
        less = "--disable-usage-stats --object-store-memory 80000000".split()
        dashboard = ["--include-dashboard", "false"]
        if dashboard_port is not None:
            dashboard = ["--dashboard-port", f"{dashboard_port}", "--dashboard-agent-listen-port", f"{free_port()}"]
        head = subprocess.Popen(
            [python, "-m", "ray.scripts.scripts", *start.split(), *less, *dashboard],
            env={**environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert head.stdout is not None
        try:
            for line in head.stdout:  # ends with the process
                if "will now block" in line:
                    break
            yield f"127.0.0.1:{port}", Path(folder)
        finally:
            head.terminate()
            head.wait()
