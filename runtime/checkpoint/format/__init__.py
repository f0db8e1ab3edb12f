"""The files of a checkpoint. Knows no model."""
