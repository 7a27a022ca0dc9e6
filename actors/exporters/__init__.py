"""Exporters of KV events in the formats of other programs."""
