"""The router of requests to several caches.

The modules, from the ground up:

    cache_directory   the caches that exist
    membership        which caches fit together, and why others are left out
    open_routes       the tokens that wait at each cache, and the promised pages
    cache_feed        one cache: its client, its events, its column of the index
    fleet_member      one destination: a cache, or the caches of an engine's ranks
    members           all destinations, which come and go
    cost              the caches to compare, and the cheapest of them
    route             the way of one request to a cache
    route_chooser     the choice of a destination for a prompt
    fleet_report      reports of the router's knowledge
    fleet             `Fleet`, which users call
"""
