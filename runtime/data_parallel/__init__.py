"""Gradients that come together. Knows Join, and no sharded optimizer."""
