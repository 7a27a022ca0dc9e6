"""Ray Serve: a router that sends requests to a replica with their prefix in its cache, and applications of it."""
