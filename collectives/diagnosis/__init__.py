"""The flight recorder, debug levels, blame and counts. Knows the contract."""
