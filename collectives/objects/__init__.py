"""How Python objects travel as bytes and tensors. Knows operations, and no transport."""
