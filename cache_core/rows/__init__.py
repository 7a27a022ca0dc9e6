"""Caches whose sequences each occupy one row of a tensor (kind "slots")."""
