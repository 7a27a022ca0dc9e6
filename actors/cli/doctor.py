"""`raydix doctor`: faults of this node and of the caches of a cluster, each with its remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydix.actors.cli.cluster import Address, Namespace, answers_of, cache_handle, complete_names, join
from raydix.actors.cli.failures import FAILED, UNREACHABLE, USAGE, CommandError
from raydix.actors.cli.output import AsJson, show
from raydix.schemas.shown import NONE, counted, cut, shown

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_ANSWER_S = 5.0
_JOIN_S = 60.0
_JOIN = "import sys; from raydix.actors.cli.cluster import join; join(sys.argv[1] or None, sys.argv[2], is_quiet=False)"
_FATAL = re.compile(r"^\[[^\]]* C \d+ \d+\] *(.*)$", re.MULTILINE)  # Ray's last line in a process that it ends
_ENDED = 1  # exit status of such a process


def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names of caches. Default: all.", autocompletion=complete_names),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 if anything is found.")] = False,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Look for faults of this node and of all caches, or those named, and print a remedy for each.

    On this node: memory that is nearly full, `/dev/shm`, the niceness of Ray's processes, and a clone that hides the
    installed package. Of each cache: the same on its node, restarts by cause, another version than this command's, and
    another PID namespace or user than this command's, if it runs on this node.

    Run it where the workers run: in their container, as their user. Without a cluster, it looks at this node alone. The
    exit status is 0 whatever it finds, unless `--strict` is given.
    """
    from raydix.actors.observe.node_facts import node_facts, worker_niceness
    from raydix.actors.service.findings import findings, niceness_finding

    facts = node_facts(worker_niceness())
    found = [*findings(facts, when="now"), *filter(None, [niceness_finding(facts.niceness)])]
    rows = [_row("node", "this node", found)]
    try:
        _check_joining(address, namespace)
        join(address, namespace)
    except CommandError as error:
        if error.exit_code == USAGE:
            raise
        rows.append(_row("cluster", "the cluster", [f"{error.message}; {error.advice}"]))
    else:
        import ray

        rows[0]["node_id"] = ray.get_runtime_context().get_node_id()
        rows += _caches(namespace, rows[0], names)
    show(rows, as_json, lambda: _text(rows))
    if strict and any(row["findings"] for row in rows):
        raise typer.Exit(FAILED)


def _check_joining(address: str | None, namespace: str) -> None:
    """Join the cluster in another process: where a part of the cluster is lost, Ray ends a process that joins.

    Raises:
        CommandError: Ray has ended that process, or it did not join in time.
    """
    import ray

    if ray.is_initialized():
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", _JOIN, address or "", namespace], capture_output=True, text=True, timeout=_JOIN_S
        )
    except subprocess.TimeoutExpired:
        cause = f"it did not answer in {_JOIN_S:g} s"
    else:
        if done.returncode != _ENDED or "Traceback" in done.stderr:  # `join` raises the error, if there is one
            return
        cause = "Ray ended the process that joined it" + "".join(f": {line}" for line in _FATAL.findall(done.stderr))
    where = f"at {address}" if address else "of this machine"
    raise CommandError(
        f"the Ray cluster {where} cannot be joined: {cut(cause)}",
        "ray status; if a part of it is lost, ray stop and ray start --head",
        UNREACHABLE,
    )


def _row(kind: str, name: str, findings: Any, node_id: str = "") -> dict[str, Any]:
    return {"kind": kind, "name": name, "node_id": node_id, "findings": list(findings)}


def _text(rows: list[dict[str, Any]]) -> str:
    """Return a line for each row, with its node, and below it a line for each finding."""
    width = max(len(shown(row["name"])) for row in rows)
    lines = []
    for row in rows:
        found = counted(len(row["findings"]), "finding") if row["findings"] else "nothing found"
        lines.append(f"{shown(row['name']):{width}}  {row['node_id'][:8] or NONE}  {found}")
        lines += [f"  {finding}" for finding in row["findings"]]
    return "\n".join(lines)


def _caches(namespace: str, node: dict[str, Any], names: list[str] | None) -> list[dict[str, Any]]:
    """Return a row for each cache, or for each of `names`. It lacks the findings that the row of this node has.

    Raises:
        CommandError: no cache of such a name runs.
    """
    from raydix.actors.cluster.deploy import find_caches
    from raydix.actors.service.findings import niceness_finding, tier_finding, version_finding
    from raydix.actors.service.past_lives import LOST_GROUP, has_lost_its_group
    from raydix.schemas.protocol import PROTOCOL, handshake, read_handshake

    if names:
        caches = {name: cache_handle(name, namespace, to_end=True) for name in names}
    else:
        caches = dict(sorted(find_caches(namespace=namespace).items()))
    found: dict[str, dict[str, Any]] = {}
    for name, cache in caches.items():
        if has_lost_its_group(cache):
            found[name] = _row("cache", name, [LOST_GROUP])
    asked = {name: cache for name, cache in caches.items() if name not in found}
    rows: dict[str, Any] = {}  # name -> handshake
    sent = {name: [cache.handshake.remote(handshake())] for name, cache in asked.items()}
    same = {}  # name of a cache of this protocol -> its handle
    for name, answer in answers_of(sent, _ANSWER_S).items():
        if answer is None:
            found[name] = _row("cache", name, _silent(asked[name]))
            continue
        rows[name] = answer[0]
        known = read_handshake(answer[0])
        if known is not None and known[1] == PROTOCOL:
            same[name] = asked[name]
        else:
            found[name] = _row("cache", name, [version_finding(answer[0])])
    sent = {name: [cache.stats.remote(), cache.pool_handle.remote()] for name, cache in same.items()}
    for name, answer in answers_of(sent, _ANSWER_S).items():
        if answer is None:
            found[name] = _row("cache", name, _silent(same[name]))
        else:
            stats, handle = answer
            about_node = [tier_finding(stats.host), niceness_finding(stats.niceness)]
            more = [*about_node, version_finding(rows[name]), _sight(handle, node["node_id"])]
            others = [finding for finding in (*stats.findings, *more) if finding and finding not in node["findings"]]
            found[name] = _row("cache", name, others, handle.node_id)
    return [found[name] for name in caches]


def _silent(cache: ActorHandle[Any]) -> list[str]:
    """Return the findings about a cache that does not answer."""
    from raydix.actors.service.findings import restarts_finding
    from raydix.actors.service.past_lives import restarts_of

    silent = (
        f"it has not answered for {_ANSWER_S:g} s: it starts, hangs, or its node is lost; see ray status, or end it: "
        "raydix stop NAME"
    )
    return [silent, *filter(None, [restarts_finding(restarts_of(cache))])]


def _sight(handle: Any, node_id: str) -> str:
    """Return the finding about a cache on this node whose process is not seen from here."""
    from raydix.actors.service.findings import sight_finding
    from raydix.actors.transport.process_liveness import ProcessLiveness

    if handle.node_id != node_id or handle.liveness_path is None:
        return ""
    return sight_finding(ProcessLiveness.find(handle.liveness_path) is not None)
