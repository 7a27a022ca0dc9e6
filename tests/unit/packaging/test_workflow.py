"""The workflow of GitHub is valid, and runs targets of the Makefile."""

import re
import subprocess
import sys

import pytest
import yaml
from support.documents import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def test_the_workflow_has_the_form_that_github_takes() -> None:
    pytest.importorskip("check_jsonschema", reason="needs the packages of the extra test: make -B venv")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]

    done = subprocess.run([*command, WORKFLOW], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


def test_the_workflow_lints_tests_and_builds_by_make() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["check"]["steps"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

    run = [step["run"] for step in steps if "run" in step]

    assert run == ["make lint", "make test", "make dist"]
    assert {line.removeprefix("make ") for line in run} <= set(targets)
