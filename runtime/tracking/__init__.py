"""Where runs are recorded. Knows reports, and no session."""
