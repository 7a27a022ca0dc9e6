"""An extension of griffe: fields as attributes of their class, and entries of docstrings that have several names.

A field's meaning is in the docstring's section "Attributes:", in pydantic's `Field(description=...)`, or in a comment
behind the field or above it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import griffe
from pydantic import BaseModel
from pydantic.fields import FieldInfo

SEVERAL_NAMES = re.compile(r"^    (\w+(?:, \w+)+):( .*(?:\n     +.*)*)", re.MULTILINE)
UNNAMED_BASES = re.compile(r"_\w+|PydanticMessage|BaseModel|NamedTuple")  # bases that say nothing to a reader
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
LONGEST_DEFAULT = 60  # characters


class Fields(griffe.Extension):
    """Completes docstrings for the site."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Complete all docstrings, once all names can be resolved."""
        for obj in _objects_in(pkg):
            if obj.docstring is not None:
                obj.docstring.value = SEVERAL_NAMES.sub(_split_entry, obj.docstring.value)
            if isinstance(obj, griffe.Class):
                obj.bases = [base for base in obj.bases if not UNNAMED_BASES.fullmatch(str(base))]
                _add_fields(obj)


def _split_entry(entry: re.Match[str]) -> str:
    """Return an entry for each of the names that one entry has, such as `k, v: each layer's tensors`."""
    return "\n".join(f"    {name}:{entry[2]}" for name in entry[1].split(", "))


def _objects_in(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield member
        if isinstance(member, (griffe.Module, griffe.Class)):
            yield from _objects_in(member)


def _add_fields(cls: griffe.Class) -> None:
    """Put the fields of a class, with types, defaults and limits, before the other attributes of its docstring."""
    fields = _fields_of(cls)
    if cls.docstring is None or not (fields or "Attributes:\n" in cls.docstring.value):
        return
    sections = cls.docstring.parse("google")
    section = next((part for part in sections if isinstance(part, griffe.DocstringSectionAttributes)), None)
    if section is None:
        section = griffe.DocstringSectionAttributes([])
        sections.append(section)
    documented = {attribute.name: attribute for attribute in section.value}
    for name, attribute in documented.items():
        if name in fields:
            fields[name].description = attribute.description
        elif attribute.annotation is None:
            attribute.annotation = _type_of_argument(cls, name)
    section.value = list((fields | {name: documented[name] for name in documented if name not in fields}).values())
    cls.docstring.__dict__["parsed"] = sections  # griffe keeps its own result there


def _fields_of(cls: griffe.Class) -> dict[str, griffe.DocstringAttribute]:
    """Return the public attributes that the body of a class annotates."""
    model = _model_of(cls)
    fields = {}
    for name, member in cls.members.items():
        if not isinstance(member, griffe.Attribute) or name.startswith("_") or not _is_field(member):
            continue
        info = model.model_fields.get(name) if model is not None else None
        fields[name] = griffe.DocstringAttribute(
            name,
            annotation=_bare(member.annotation, cls),
            value=_default_in_code(member.value) if info is None else _default_of(info),
            description=_comment_on(member) if info is None else _meaning_of(info),
        )
    return fields


def _is_field(member: griffe.Attribute) -> bool:
    """Whether the body of a class annotates an attribute, and not its `__init__`."""
    if member.annotation is None or "property" in member.labels or "instance-attribute" not in member.labels:
        return False
    return re.match(rf"\s+{member.name}:", _lines_to(member)[-1]) is not None


def _lines_to(member: griffe.Attribute) -> list[str]:
    """Return the lines of a module up to the first line of an attribute."""
    return member.module.source.splitlines()[: member.lineno or 1]


def _model_of(cls: griffe.Class) -> type[BaseModel] | None:
    """Return a message or a configuration that is a class of pydantic, which needs no torch; None: another class."""
    if not cls.path.startswith(("raydix.schemas.", "raydix.actors.engines.settings.")):
        return None
    value = getattr(importlib.import_module(cls.module.path), cls.name, None)
    return value if isinstance(value, type) and issubclass(value, BaseModel) else None


def _bare(annotation: str | griffe.Expr | None, scope: griffe.Class) -> str | griffe.Expr | None:
    """Return the type of an annotation, without the rules that `Annotated` adds, here or under another name."""
    if isinstance(annotation, griffe.ExprName) and annotation.canonical_path.startswith("raydix."):
        named = scope.modules_collection.get_member(annotation.canonical_path)
        value = named.value if named.is_attribute else None
        return _bare(value, scope) if isinstance(value, (griffe.ExprSubscript, griffe.ExprBinOp)) else annotation
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        (bare, *_) = annotation.slice.elements if isinstance(annotation.slice, griffe.ExprTuple) else [annotation]
        return _bare(bare, scope)
    if isinstance(annotation, griffe.ExprBinOp):
        left, right = (_bare(part, scope) or "None" for part in (annotation.left, annotation.right))
        return griffe.ExprBinOp(left, annotation.operator, right)
    return annotation


def _default_in_code(value: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Return a field's default as its class names it, also in `field(default=...)` of a dataclass.

    A property that a function makes has none.
    """
    if isinstance(value, griffe.ExprCall) and str(value.function) == "_of_lease":
        return None
    if isinstance(value, griffe.ExprCall) and str(value.function) == "field":
        named = [part for part in value.arguments if isinstance(part, griffe.ExprKeyword)]
        return next((part.value for part in named if part.name in ("default", "default_factory")), None)
    return value


def _default_of(info: FieldInfo) -> str | None:
    """Return a field's default as code; of a long one its type alone. None: the field is required."""
    if info.is_required():
        return None
    default = info.get_default(call_default_factory=True)
    code = repr(default)
    return code if len(code) <= LONGEST_DEFAULT else f"{type(default).__name__}()"


def _meaning_of(info: FieldInfo) -> str:
    """Return a field's description, and its limits."""
    found = [(words, getattr(rule, name, None)) for rule in info.metadata for name, words in LIMITS.items()]
    limits = ", ".join(f"{words} {limit:,}" for words, limit in found if limit is not None)
    return " ".join(part for part in (info.description, f"({limits})" if limits else "") if part)


def _comment_on(member: griffe.Attribute) -> str:
    """Return the comment behind a field, or the lines of comment above it."""
    *before, line = _lines_to(member)
    if behind := line.partition("  # ")[2]:
        return behind
    above: list[str] = []
    while before and before[-1].lstrip().startswith("# "):
        above.insert(0, before.pop().strip().removeprefix("# "))
    return " ".join(above)


def _type_of_argument(cls: griffe.Class, name: str) -> str | griffe.Expr | None:
    """Return the type of an argument of `__init__`: errors keep their arguments under the same names."""
    init = cls.members.get("__init__")
    return init.parameters[name].annotation if isinstance(init, griffe.Function) and name in init.parameters else None
