"""Uneven inputs. Knows the process, and no model."""
