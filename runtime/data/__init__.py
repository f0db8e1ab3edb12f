"""Which rank gets which samples. Knows Join, and no model."""
