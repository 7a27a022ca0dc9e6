"""The handshake of a process, and the version in it."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from raydix.schemas import protocol, version


def test_a_process_that_runs_from_a_folder_has_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", not_installed)
    monkeypatch.setattr(version, "find_commit", lambda: "")

    assert version.package_version.__wrapped__() == "unknown"


def test_a_handshake_names_the_version_with_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    name, number, release = protocol.handshake()
    monkeypatch.setattr(version, "find_commit", lambda: "1a2b3c4d5e6f")

    assert (name, number, release) == ("raydix", protocol.PROTOCOL, version.package_version())
    assert version.package_version.__wrapped__() == f"{release.partition('+')[0]}+1a2b3c4d5e6f"


def test_the_commit_is_that_of_a_clone_with_a_mark_if_it_has_changes(tmp_path: Path) -> None:
    assert version.find_commit(tmp_path) == ""

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    git("tag", "v1")

    assert version.find_commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")

    (tmp_path / "file").write_text("two")
    assert version.find_commit(tmp_path) == git("rev-parse", "--short=12", "HEAD") + ".dirty"


def test_where_git_fails_no_commit_is_known(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere\n")

    assert version.find_commit(tmp_path) == ""
