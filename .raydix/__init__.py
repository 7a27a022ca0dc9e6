"""Raydix: a prefix KV cache for LLM serving on Ray.

raydix.actors       the cache actor, its clients, workers, the router, the command line
raydix.cache_core   the trees, pools and leases, without Ray
raydix.schemas      messages, configuration, errors and statistics
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from raydix.schemas.version import package_version  # here, so that no package import waits for it

        return package_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
