"""A cache's counts as Ray's metrics, for Prometheus: `table` lists them, `publisher` publishes them on a timer."""
