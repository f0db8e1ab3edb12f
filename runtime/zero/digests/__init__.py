"""Whether copies are still equal, and which one is wrong. Knows shards."""
