"""Lightning's strategy. Knows models, optimizers and averaging."""
