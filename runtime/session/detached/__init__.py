"""A session that outlives its program: its host and its clients. Knows what holds actors."""
