"""Debian's `prometheus` on a port of its own, and its answers; `promtool`, which checks and tests rules."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from support.waiting import wait_until


def promtool(*arguments: str | Path) -> str:
    """Run `promtool` and return its output; it must succeed."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer."""
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=60) as page:
            return json.load(page)["data"]

    def is_ready(self) -> bool:
        """Return whether it answers."""
        try:
            urllib.request.urlopen(f"{self._url}/-/ready", timeout=60).close()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def values(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """Return the present values of an expression, by their labels."""
        found = self.get("/api/v1/query", query=expression)["result"]
        return {frozenset(row["metric"].items()): float(row["value"][1]) for row in found}

    def firing(self) -> dict[str, dict[str, str]]:
        """Return the annotations of the alerts that fire, by name."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {each["labels"]["alertname"]: each["annotations"] for each in alerts if each["state"] == "firing"}


@contextmanager
def running_prometheus(folder: Path, target: str, rules: str) -> Iterator[Prometheus]:
    """Run a server that scrapes a target and evaluates rules every second.

    Args:
        folder: for its files.
        target: host and port.
        rules: the text of a file of rules.
    """
    (folder / "rules.yml").write_text(rules)
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: server.poll() is not None or prometheus.is_ready())
        assert server.poll() is None, (folder / "prometheus.log").read_text()
        yield prometheus
    finally:
        server.terminate()
        server.wait()
