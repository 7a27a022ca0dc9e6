"""An index of the pages that many caches hold, for routers: `PageIndex`, and the hashes that it takes."""
