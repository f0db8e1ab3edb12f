"""Memory and state of shards, and how finely they are cut. Knows no vote."""
