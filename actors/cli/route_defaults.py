"""Names and defaults of the options about routers. Their own modules take a second to import; a test compares them."""

ROUTERS = ("random", "round_robin", "least", "ttft", "shared")
WEIGHT, PROMISE_TTL_S, NUM_RANDOM = 3.0, 20.0, 2
