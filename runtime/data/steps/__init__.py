"""Steps of a fixed global batch. Knows the samples; models only by a protocol."""
