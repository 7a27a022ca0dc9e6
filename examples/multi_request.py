"""Many conversations and several model workers on one prefix cache: the savings, and a check of every answer.

    python examples/multi_request.py                # the same as `make demo` and `raydix demo`
    python examples/multi_request.py --conversations 48 --workers 4 --pool-tokens 16384

`raydix.actors.demo.run` has the code: it starts the cache, lets the workers share it, measures, and checks the results.
The program ends with a table, and with exit status 1 if the cache broke one of its promises.
"""

import sys

from raydix.actors.cli.app import app

if __name__ == "__main__":
    app(["demo", *sys.argv[1:]], prog_name="raydix")
