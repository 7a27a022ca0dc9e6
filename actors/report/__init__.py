"""The report of a cache as one HTML page: `Insight` gathers the data in the cache's process, `page.render` draws it."""
