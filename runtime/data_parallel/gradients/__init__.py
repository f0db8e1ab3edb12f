"""Buckets, and how each is reduced. Knows groups, and not the wrapped model."""
