"""What an operation, a step, a start, a save and a recovery cost, beside peers in the same run."""
