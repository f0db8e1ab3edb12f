"""Models that are averaged now and then. Knows optimizers, and no recovery."""
