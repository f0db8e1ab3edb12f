"""Every interleaving of small runs; runs with losses that end with the bits of one process."""
