"""`raydix tree`: the radix tree of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask_client, cache_handle, join
from raydix.actors.cli.output import AsJson, show
from raydix.schemas.shown import counted, short_time

if TYPE_CHECKING:
    from raydix.schemas import TreeBranch, TreeResponse

_SHOWN = 4  # tokens of each node


def tree(
    name: CacheName,
    depth: Annotated[int, typer.Option(min=0, max=4096, help="Levels below the namespaces.")] = 4,
    width: Annotated[int, typer.Option(min=1, max=4096, help="Children to show of each node, the largest.")] = 8,
    num_nodes: Annotated[int, typer.Option("--nodes", min=1, max=4096, help="Nodes to show in total.")] = 60,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Show the tree: the tokens, size, locks, hits and last use of each node, and the size below it.

    A node is named by the first tokens in which it differs from its siblings.

    The cache visits 4,096 nodes at most; sizes that may be larger are marked with +.
    """
    join(address, namespace)
    answer = ask_client(
        cache_handle(name, namespace),
        "tree",
        lambda client: client.tree(max_nodes=num_nodes, max_depth=depth, max_width=width),
    )
    show(answer, as_json, lambda: _drawn(name, answer))


def _drawn(name: str, answer: TreeResponse) -> Tree:
    root = Tree(
        Text(
            f"{name}: {counted(answer.num_namespaces, 'namespace')}"
            if answer.branches
            else f"{name}: nothing is cached"
        )
    )
    drawn: list[Tree] = []
    shown = [0] * len(answer.branches)
    for branch in answer.branches:
        above = root if branch.parent is None else drawn[branch.parent]
        drawn.append(above.add(Text(_namespace(branch) if branch.parent is None else _line(branch))))
        if branch.parent is not None:
            shown[branch.parent] += 1
    for branch, node, num in zip(answer.branches, drawn, shown, strict=True):
        if hidden := branch.num_children - num:
            node.add(Text(f"{hidden:,} more", style="dim"))
    return root


def _namespace(branch: TreeBranch) -> str:
    fields = {"extra_key": branch.extra_key, "lora_id": branch.lora_id, "cache_salt": branch.cache_salt}
    given = ", ".join(f"{field}={value!r}" for field, value in fields.items() if value is not None)
    return f"{given or 'no namespace'}: {_below(branch)}"


def _line(branch: TreeBranch) -> str:
    """Return the line of a node, with its tokens last: a narrow terminal cuts the end."""
    locks = f", {counted(branch.num_locks, 'lock')}" if branch.num_locks else ""
    more = "" if branch.is_whole else "+"
    num_tokens, num_nodes = branch.num_tokens_below - branch.num_tokens, branch.num_nodes - 1
    below = f", {num_tokens:,}{more} in {counted(num_nodes, 'node', more)} below" if branch.num_children else ""
    tokens = " ".join(map(str, branch.tokens[:_SHOWN])) + (" ..." if branch.num_tokens > _SHOWN else "")
    age = f"{counted(branch.age, 'use')} ago" if branch.unused_s is None else f"{short_time(branch.unused_s)} ago"
    uses = f"{counted(branch.num_hits, 'hit')}, last used {age}"
    return f"{counted(branch.num_tokens, 'token')}{below}{locks}, {uses}  [{tokens}]"


def _below(branch: TreeBranch) -> str:
    more = "" if branch.is_whole else "+"
    num_nodes = branch.num_nodes - (branch.parent is None)
    return f"{counted(branch.num_tokens_below, 'token', more)} in {counted(num_nodes, 'node', more)}"
