"""What a cache has been doing, as one page: gathered where it runs (`Insight`), drawn by `page.render`."""
