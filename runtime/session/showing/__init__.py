"""How a run is shown where it was started. Knows what workers report."""
