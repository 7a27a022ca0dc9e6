"""Helpers of the event loop: periodic calls, and turns for background work."""
