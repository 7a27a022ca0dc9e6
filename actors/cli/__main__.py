"""`python -m raydix.actors.cli`: the `raydix` command."""

from raydix.actors.cli.app import app

if __name__ == "__main__":
    app(prog_name="raydix")
