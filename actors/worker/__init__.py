"""A rank's process: its control loop and its training thread. Knows no driver's code."""
