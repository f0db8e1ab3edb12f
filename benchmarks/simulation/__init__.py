"""Clusters of thousands of workers, by the driver's own decisions and measured constants."""
