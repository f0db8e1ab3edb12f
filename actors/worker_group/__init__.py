"""The session's hold on its actors. Knows the driver and the worker."""
