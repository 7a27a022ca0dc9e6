"""`raydix weights`: the label of the weights that a cache's KV is of, and new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask_client, cache_handle, cache_names, join
from raydix.actors.cli.failures import UNREACHABLE, USAGE, CommandError
from raydix.actors.cli.output import AsJson, show
from raydix.actors.cluster.rank_names import group_ranks, missing_ranks, rank_name
from raydix.schemas.shown import brief, shown

if TYPE_CHECKING:
    from raydix.actors import PrefixCacheClient


def weights(
    name: CacheName,
    label: Annotated[
        str | None, typer.Argument(metavar="LABEL", help="Name of the new weights, which every worker has.")
    ] = None,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Print the label of the base model's weights; with LABEL, name new ones: all cached KV becomes unmatchable.

    The label that a cache has already changes nothing. If there is no cache NAME, but NAME-tp0, NAME-tp1 and so on,
    the command acts on all of them in that order. If it fails at one of them, it can be repeated.
    """
    if label is not None:
        _check_label(label)
    join(address, namespace)
    handles = [
        (cache_name, cache_handle(cache_name, namespace)) for cache_name in _ranks_of(name, cache_names(namespace))
    ]

    async def ask(client: PrefixCacheClient) -> dict[str, Any]:
        if label is None:
            return (await client.weights()).model_dump()
        return {"label": label, "generation": await client.set_weights(label)}

    rows = [{"name": cache_name} | ask_client(cache, "weights", ask) for cache_name, cache in handles]
    show(rows, as_json, lambda: "\n".join(map(_sentence, rows)))


def _check_label(label: str) -> None:
    from pydantic import ValidationError

    from raydix.schemas.fingerprint import MAX_NAME, SetWeightsRequest

    try:
        SetWeightsRequest(label=label)
    except ValidationError:
        rule = f"LABEL must be a text of 1 to {MAX_NAME} characters in UTF-8"
        raise CommandError(f"{rule}, not {brief(label)}", "raydix weights NAME step-200", USAGE) from None


def _ranks_of(name: str, names: list[str]) -> list[str]:
    """Return `name`, or the caches of its ranks if there are any and none of that name.

    Raises:
        CommandError: a rank is missing.
    """
    ranks = group_ranks(names).get(name, {})
    if missing := missing_ranks(ranks):
        raise CommandError(
            f"of the ranks of {name!r}, up to {list(ranks.values())[-1]}, {rank_name(name, missing[0])} does not run",
            "raydix list, or raydix start",
            UNREACHABLE,
        )
    return list(ranks.values()) or [name]


def _sentence(row: dict[str, Any]) -> str:
    if row["label"] is None:
        return f"{shown(row['name'])}: no weights are named yet"
    return f"{shown(row['name'])}: weights {brief(row['label'])}, generation {row['generation']}"
