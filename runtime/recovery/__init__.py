"""How a run continues when ranks are lost. Knows all that has state."""
