"""`raydix explain`: the length of a prompt's hit, and the reason why it ends there."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask_client, cache_handle, join
from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import AsJson, show
from raydix.schemas.shown import brief

_FORM = "a JSON list, as [1, 2, 3]"

TokensFile = Annotated[
    str,
    typer.Option("--tokens", metavar="FILE", help="The prompt's token ids: a JSON list, a .npy file, or - for stdin."),
]
NamespacePart = Annotated[str | None, typer.Option(help="Part of the prompt's namespace.")]


def explain(
    name: CacheName,
    tokens: TokensFile,
    extra_key: NamespacePart = None,
    lora_id: NamespacePart = None,
    cache_salt: NamespacePart = None,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Print how much of a prompt is cached, and why other tokens are not: never stored, evicted, retired, and so on."""
    ids = read_tokens(tokens)
    join(address, namespace)
    fields = {"extra_key": extra_key, "lora_id": lora_id, "cache_salt": cache_salt}
    answer = ask_client(cache_handle(name, namespace), "explain", lambda client: client.explain(ids, **fields))
    show(answer, as_json, lambda: str(answer))


def read_tokens(source: str) -> Any:
    """Return the token ids of a file: a .npy array, or a JSON list.

    Raises:
        CommandError: the file cannot be read, has another format or no ids, or an id is wrong.
    """
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise CommandError(f"{source}: {error.strerror}", "give a file with token ids, or - for stdin", USAGE) from None
    try:
        if data.startswith(b"\x93NUMPY"):
            import numpy as np

            ids = np.load(io.BytesIO(data), allow_pickle=False).tolist()
        else:
            ids = json.loads(data)
    except (ValueError, EOFError, RecursionError) as error:
        raise CommandError(f"{source}: {error}", "a JSON list, as [1, 2, 3], or a .npy file", USAGE) from None
    if not isinstance(ids, list):
        raise CommandError(f"{source}: not a list of token ids", _FORM, USAGE)
    if not ids:
        raise CommandError(f"{source}: no token ids, but at least one is needed", _FORM, USAGE)
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < 2**64:
            raise CommandError(
                f"{source}: the token id at index {index:,} must be an integer in [0, 2**64), not {brief(token)}",
                _FORM,
                USAGE,
            )
    return ids
