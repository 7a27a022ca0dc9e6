"""`raydix fleet`: the commands about several caches with routers in front of them."""

from __future__ import annotations

import typer

from raydix.actors.cli import fleet_replay, fleet_state

app = typer.Typer(no_args_is_help=True, help="Several caches and the routers in front of them.")
app.command("replay")(fleet_replay.replay)
app.command("list")(fleet_state.list_fleet)
app.command("stats")(fleet_state.stats)
app.command("explain")(fleet_state.explain)
