"""The tiers below a cache's pool: the threads that copy pages to them and back, their memory, and their files."""
