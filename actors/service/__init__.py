"""The cache as a service: the actor, its request handlers, and the tasks that run beside them."""
