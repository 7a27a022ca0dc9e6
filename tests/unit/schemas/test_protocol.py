"""The handshake of a process."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from raydix.schemas import protocol


def test_a_process_that_runs_from_a_folder_has_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(protocol, "version", not_installed)

    name, number, release = protocol.handshake.__wrapped__()

    assert (name, number) == protocol.handshake()[:2]
    assert release == "unknown"
