"""Calls to actors whose end is always known. Knows Ray, and no message."""
