"""A train function, what it is given, and how it is called again. Knows no session."""
