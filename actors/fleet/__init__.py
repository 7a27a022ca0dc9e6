"""The router of requests to several caches.

    cache_directory    which caches there are
    cache_feed         one cache: its client, its events, its column of the index
    membership         which caches fit together, and why others are left out
    fleet_member       one destination: a cache, or the caches of an engine's ranks
    members            all destinations, as they come and go
    open_routes        the tokens that wait at each cache, and the promised pages
    cost               which caches are compared, and the cheapest of them
    route_chooser      the choice of a destination for a prompt
    route              its result
    fleet_report       reports of the router's knowledge
    fleet              `Fleet`, which users call
"""
