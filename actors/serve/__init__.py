"""Ray Serve: a router that sends requests to the replica whose cache has their prefix, and applications of it."""
