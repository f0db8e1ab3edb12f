"""What the driver decides (pure), and the actor that carries it out. Knows no worker's code."""
