"""How client and cache treat a request: its class says so, and no other module lists classes of requests."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import get_type_hints

import pytest
from support.source_files import parse, source_files, where

from raydix import schemas
from raydix.actors import PrefixCacheClient
from raydix.schemas import Message, TokenIds

PUBLIC = [getattr(schemas, name) for name in schemas.__all__]
MESSAGES = [model for model in PUBLIC if inspect.isclass(model) and issubclass(model, Message)]
REQUESTS = [model for model in MESSAGES if model.__name__.endswith("Request")]

TAKES_SLOTS = {"AcquireRequest", "LockRequest", "ExtendRequest"}
ALWAYS_QUEUED = {"ReleaseRequest", "AbortRequest", "TakeBackRequest", "WithdrawRequest"}
TOKEN_FIELDS = {
    "AcquireRequest": "tokens",
    "ExplainRequest": "tokens",
    "InsertRequest": "suffix",
    "LockRequest": "tokens",
    "MatchRequest": "tokens",
    "PrefetchRequest": "tokens",
}
TRACED = {
    "AbortRequest": "abort",
    "AcquireRequest": "acquire",
    "ExtendRequest": "extend",
    "InsertRequest": "insert",
    "LockRequest": "lock",
    "MatchRequest": "match",
    "ReleaseRequest": "release",
}


def test_each_request_is_treated_as_its_class_says() -> None:
    assert {model.__name__ for model in MESSAGES if model.takes_slots} == TAKES_SLOTS
    assert {model.__name__ for model in MESSAGES if model.is_always_queued} == ALWAYS_QUEUED
    assert {model.__name__: model.token_field for model in MESSAGES if model.token_field is not None} == TOKEN_FIELDS
    assert {model.__name__: model.traced_as for model in MESSAGES if model.traced_as is not None} == TRACED


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_the_properties_are_of_the_class_and_are_not_fields(model: type[Message]) -> None:
    properties = {"takes_slots", "is_always_queued", "token_field", "traced_as"}

    assert properties.isdisjoint(model.field_names())
    if dataclasses.is_dataclass(model):
        assert properties.isdisjoint(field.name for field in dataclasses.fields(model))


def test_a_request_with_token_ids_names_their_field() -> None:
    for model in REQUESTS:
        hints = get_type_hints(model)
        fields = [name for name in model.field_names() if hints[name] is TokenIds]
        assert fields == ([] if model.token_field is None else [model.token_field])


def test_a_traced_verb_is_a_method_of_the_client() -> None:
    assert all(inspect.isfunction(getattr(PrefixCacheClient, verb)) for verb in TRACED.values())


def lists_of_requests(module: ast.Module) -> list[str]:
    """The names that a module binds, outside functions, to a literal with two classes of requests or more."""
    bound = [node for node in module.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None]
    return [ast.unparse(statement).split("=")[0].strip() for statement in bound if has_requests(statement)]


def has_requests(statement: ast.stmt) -> bool:
    names = {model.__name__ for model in REQUESTS}
    for node in ast.walk(statement):
        elements = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else getattr(node, "keys", [])
        if sum(isinstance(element, ast.Name) and element.id in names for element in elements) > 1:
            return True
    return False


def test_no_module_lists_classes_of_requests() -> None:
    lists = {where(path): lists_of_requests(parse(path.read_text())) for path in source_files("actors", "schemas")}

    assert {path: names for path, names in lists.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "A = (AbortRequest, LockRequest)",
        "A: set[type] = {AbortRequest, LockRequest}",
        "A = {EvictRequest: 1, LockRequest: 2}",
    ],
)
def test_a_list_of_requests_is_found(source: str) -> None:
    assert lists_of_requests(parse(source)) == [source.split(" =")[0]]
