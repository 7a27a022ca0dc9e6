"""The tiers below a cache's pool: as requests see them, and the parts that all of them need; each kind has a folder."""
