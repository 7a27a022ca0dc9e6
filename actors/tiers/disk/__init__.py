"""The tier on a local disk: its files and index, its threads, its spaces, and its work in slices of the event loop."""
