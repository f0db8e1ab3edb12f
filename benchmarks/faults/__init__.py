"""Processes that are killed, stopped and drained, and bits that flip, as a seed has it."""
