"""The `raydix` command. `raydix.actors.cli.app` has the commands, one module each beside it.

A command's module is loaded for `--help`, so it imports Ray and torch only where they are used.
"""
