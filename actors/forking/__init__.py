"""Workers that are forks of a process which has imported torch."""
