"""Several caches behind routers: the cost of a route, and a simulation of a fleet on recorded traffic."""
