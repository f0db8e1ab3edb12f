"""The sharded optimizer. Knows models, and no recovery but by a protocol."""
