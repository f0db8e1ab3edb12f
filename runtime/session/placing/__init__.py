"""Where in the cluster the workers are. Knows Ray, and no run."""
