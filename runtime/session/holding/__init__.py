"""How a session starts, uses and ends its actors, and with which options."""
