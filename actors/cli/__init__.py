"""The `raydix` command: `app` has the table of commands, and each command has a module.

`--help` loads the modules of all commands, so each imports Ray and torch inside its functions.
"""
