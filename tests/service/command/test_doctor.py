"""`raydix doctor` where it cannot join the cluster: it still looks at this node, and names the cause."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
from support.processes.ray_head import ray_head_in_folder


def diagnosis(*options: str) -> list[dict[str, Any]]:
    """Return the rows that the command prints in a process of its own."""
    command = [sys.executable, "-m", "raydix.actors.cli", "doctor", "--json", *options]
    done = subprocess.run(
        command, env=os.environ | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, check=True
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_without_a_cluster_it_looks_at_this_node() -> None:
    node, cluster = diagnosis("--address", "127.0.0.1:1")

    assert (node["kind"], node["name"], node["node_id"]) == ("node", "this node", "")
    (finding,) = cluster["findings"]
    assert finding.startswith("no Ray cluster answers at 127.0.0.1:1: ") and "ray start --head" in finding


@pytest.mark.more
@pytest.mark.ray
def test_a_cluster_that_has_lost_its_sockets_is_named_with_the_cause() -> None:
    """Ray ends each process that joins such a cluster, without an exception."""
    with ray_head_in_folder(RAY_AUTH_MODE="disabled") as (address, folder):
        (whole,) = diagnosis("--address", address)
        (sockets,) = folder.glob("session_2*/sockets")
        shutil.rmtree(sockets)

        node, cluster = diagnosis("--address", address)

    assert whole["node_id"] and not node["node_id"]
    (finding,) = cluster["findings"]
    assert finding.startswith(f"the Ray cluster at {address} cannot be joined: Ray ended the process that joined it: ")
    assert "Failed to connect to socket" in finding and finding.endswith("ray stop and ray start --head")
