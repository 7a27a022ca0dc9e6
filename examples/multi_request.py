"""Many conversations, several model workers, one prefix cache: what sharing saves, and that it changes no answer.

    python examples/multi_request.py                # what `make demo` runs, and `raydix demo`
    python examples/multi_request.py --conversations 48 --workers 4 --pool-tokens 16384

`raydix.actors.demo` tells the story: how the cache is started, how the workers share it, what is measured and what has
to come out. Ends with a table, and with exit status 1 if the cache did not keep one of its promises.
"""

import sys

from raydix.actors.cli.app import app

if __name__ == "__main__":
    app(["demo", *sys.argv[1:]], prog_name="raydix")
