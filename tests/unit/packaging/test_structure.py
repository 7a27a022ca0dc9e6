"""Classes of `cache_core` and `actors` are whole: short chains of bases, and private attributes stay in their file."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.source_files import parse, source_files, where

CHECKED = ("actors", "cache_core")
MAX_CHAIN = 2
MAX_EXCEPTIONS = 10
MESSAGES_AND_ERRORS = {"BaseModel", "Message", "Exception", "ValueError", "TypeError"}  # with all their subclasses
PUBLIC_NODES = {"MambaTreeNode"}  # nodes of users derive from it, too
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, whatever they are called

PRIVATE_ATTRIBUTES_READ_ELSEWHERE = {  # of other packages, which have no public name for them; may only shrink
    "actors/serve/router.py _deployment_id",
    "actors/huggingface/fingerprint.py _version",
    "actors/huggingface/small_twin.py _attn_implementation_internal",
    "actors/huggingface/small_twin.py _experts_implementation",
    "actors/service/past_lives.py _connect_and_get_accessor",
    "actors/transport/ray_calls.py _actor_id",
}


class ClassFound(NamedTuple):
    """A class of ours, as its source says."""

    file: str
    name: str
    bases: list[str]
    is_abstract: bool


def classes_in(path: Path) -> Iterator[ClassFound]:
    for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            decorators = {name_of(each) for method in methods_of(node) for each in method.decorator_list}
            bases = [name_of(base) for base in node.bases]
            is_abstract = "abstractmethod" in decorators or bool({"ABC", "Protocol"} & set(bases))
            yield ClassFound(where(path), node.name, bases, is_abstract)


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; of `Base[T]` that of `Base`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=value):
            return name_of(value)
    return ""


FOUND = [each for path in source_files(*CHECKED, "schemas") for each in classes_in(path)]
CLASSES = {each.name: each for each in FOUND}


def concrete_bases(name: str) -> list[str]:
    """The bases of a class that are ours and concrete: neither contracts, nor errors, nor bases of messages."""
    return [base for base in CLASSES[name].bases if is_counted(base)]


def is_counted(name: str) -> bool:
    if name not in CLASSES or CLASSES[name].is_abstract or name in PUBLIC_NODES:
        return False
    return CLASSES[name].file.split("/")[0] in CHECKED and not is_message_or_error(name)


def is_message_or_error(name: str) -> bool:
    bases = CLASSES[name].bases if name in CLASSES else []
    return name in MESSAGES_AND_ERRORS or any(map(is_message_or_error, bases))


def chain_length(name: str) -> int:
    """The number of concrete classes of ours in the longest chain of bases that ends with this one."""
    return 1 + max((chain_length(base) for base in concrete_bases(name)), default=0)


def test_no_two_classes_have_the_name_of_a_base() -> None:
    bases = {base for each in FOUND for base in each.bases}
    names = Counter(each.name for each in FOUND)

    assert [base for base in sorted(bases) if names[base] > 1] == []


def test_a_class_derives_from_one_concrete_class_of_ours_at_most() -> None:
    offences = {
        f"{each.file} {each.name}" for each in FOUND if is_counted(each.name) and len(concrete_bases(each.name)) > 1
    }

    assert offences == set()


def test_chains_of_concrete_classes_are_short() -> None:
    offences = {
        f"{each.file} {each.name}" for each in FOUND if is_counted(each.name) and chain_length(each.name) > MAX_CHAIN
    }

    assert offences == set()


def names_in(definition: ast.stmt) -> set[str]:
    """The names that a statement of a class body defines; with `__slots__`, those of the slots."""
    match definition:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=targets, value=value):
            names = {each.id for each in targets if isinstance(each, ast.Name)}
            slots = ast.walk(value) if "__slots__" in names else ()
            return names | {str(each.value) for each in slots if isinstance(each, ast.Constant)}
    return set()


def own_attributes(module: ast.Module) -> set[str]:
    """The attributes that the classes of a file define, and those that their methods set on `self`."""
    own: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.ClassDef(body=body):
                own.update(*map(names_in, body))
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
    return own


def foreign_private_attributes(path: Path) -> set[str]:
    """The attributes with one leading underscore that a file uses and none of its classes has."""
    module = parse(path.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    return private - own_attributes(module) - NAMED_TUPLE


def test_private_attributes_are_used_in_the_file_of_their_class_alone() -> None:
    offences = {f"{where(path)} {name}" for path in source_files(*CHECKED) for name in foreign_private_attributes(path)}

    assert offences == PRIVATE_ATTRIBUTES_READ_ELSEWHERE
    assert len(PRIVATE_ATTRIBUTES_READ_ELSEWHERE) <= MAX_EXCEPTIONS


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    module = parse("class A:\n    __slots__ = ('_a',)\n    def _m(self): self._b = lease._c\n")

    assert own_attributes(module) == {"__slots__", "_a", "_m", "_b"}
    (tmp_path / "a.py").write_text("class A:\n    def m(self, other): return self._x, other._y._asdict()\n")
    assert foreign_private_attributes(tmp_path / "a.py") == {"_x", "_y"}
