"""A cache's counts as Ray's metrics, for Prometheus: `table` says which, `publisher` sends them now and then."""
