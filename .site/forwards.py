"""An extension of griffe: the arguments of functions that pass them on to a verb, which has them in its signature."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import griffe


class Forwards(griffe.Extension):
    """Shows a method that is made of a verb as a function, and the options of a verb in place of `**options`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Complete all functions that pass arguments on, once all names can be resolved."""
        for scope in list(_scopes_in(pkg)):
            for member in list(scope.members.values()):
                if isinstance(member, griffe.Function):
                    verbs = [_verb_in(decorator.value, pkg) for decorator in member.decorators]
                elif isinstance(member, griffe.Attribute):
                    verbs = [_verb_in(member.value, pkg)]
                else:
                    continue
                for verb in filter(None, verbs):
                    made = member if isinstance(member, griffe.Function) else _method_of(member, verb)
                    scope.set_member(member.name, made)
                    made.parameters = _parameters_of(made, verb)


def _scopes_in(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Module | griffe.Class]:
    yield parent
    for member in parent.members.values():
        if isinstance(member, (griffe.Module, griffe.Class)):
            yield from _scopes_in(member)


def _verb_in(call: str | griffe.Expr | None, pkg: griffe.Module) -> griffe.Function | None:
    """Return the method that is the first argument of a call, as in `with_options_of(PrefixCacheClient.acquire)`."""
    if not isinstance(call, griffe.ExprCall) or not call.arguments:
        return None
    first = call.arguments[0]
    path = first.canonical_path if isinstance(first, griffe.ExprAttribute) else ""
    try:
        verb = pkg.modules_collection.get_member(path) if path.startswith("raydix.") else None
    except KeyError:
        return None
    return verb if isinstance(verb, griffe.Function) else None


def _method_of(attribute: griffe.Attribute, verb: griffe.Function) -> griffe.Function:
    """Return the method in the place of an attribute, with the verb's documentation."""
    method = griffe.Function(
        attribute.name,
        returns=verb.returns,
        docstring=verb.docstring,
        lineno=attribute.lineno,
        endlineno=attribute.endlineno,
    )
    method.labels = set(verb.labels)
    return method


def _parameters_of(function: griffe.Function, verb: griffe.Function) -> griffe.Parameters:
    """Return the parameters that Python shows for a function: its own, and those of the verb."""
    value: Any = importlib.import_module(function.module.path)
    for name in function.path.removeprefix(f"{function.module.path}.").split("."):
        value = getattr(value, name)
    shown = inspect.signature(value).parameters
    named = {name: griffe.Parameter(name, annotation=part.annotation) for name, part in shown.items()}
    for known in (*verb.parameters, *function.parameters):
        if known.name in named:
            named[known.name] = known
    return griffe.Parameters(*named.values())
