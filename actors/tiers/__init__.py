"""The tiers below a cache's pool: what copies pages to them and back, and their memory."""
