"""What a worker reports, prints and measures. Knows messages."""
