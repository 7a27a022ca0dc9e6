"""`RaydixConnector` against the recorded interface of vLLM's connectors; `make test-engines` compares the record."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.engines.base_signatures import recorded

SOURCE = Path(__file__).parents[3] / "actors" / "engines" / "vllm" / "connector.py"
MODULE = ast.parse(SOURCE.read_text(encoding="utf-8"))
NOT_IN_THE_TABLE = {"__init__"}


def methods_of_the_connector() -> dict[str, ast.FunctionDef]:
    (connector,) = (node for node in MODULE.body if isinstance(node, ast.ClassDef) and node.name == "RaydixConnector")
    return {node.name: node for node in connector.body if isinstance(node, ast.FunctionDef)}


def parameters_of(method: ast.FunctionDef) -> list[str]:
    arguments = method.args
    more = [each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]] + more


def test_each_method_has_the_parameters_of_the_base_class() -> None:
    ours, base = methods_of_the_connector(), recorded()
    differing = {
        name: parameters_of(method)
        for name, method in ours.items()
        if name in base and parameters_of(method) != base[name]["parameters"]
    }

    assert differing == {}


def test_each_abstract_method_is_there() -> None:
    ours = methods_of_the_connector()

    assert [name for name, each in recorded().items() if each["abstract"] and name not in ours] == []


def test_the_other_public_methods_are_none_of_vllms_private_ones() -> None:
    ours, base = methods_of_the_connector(), recorded()

    assert {name for name in ours if not name.startswith("_")} <= base.keys()


def test_the_table_in_the_docstring_has_each_method_once() -> None:
    table = re.findall(r"^\| `(\w+)` \|", ast.get_docstring(MODULE) or "", re.MULTILINE)
    overridden = methods_of_the_connector().keys() & recorded().keys() - NOT_IN_THE_TABLE

    assert sorted(table) == sorted(overridden)


def test_the_rules_see_another_parameter() -> None:
    method = ast.parse("def f(self, request, *, more=1, **kwargs): ...").body[0]

    assert isinstance(method, ast.FunctionDef)
    assert parameters_of(method) == ["self", "request", "more", "kwargs"]
