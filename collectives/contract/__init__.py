"""An operation, its Work and its errors: what every transport promises. Knows no other folder."""
