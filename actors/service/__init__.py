"""The cache as a service: the actor, the dispatch of requests, and the background tasks."""
