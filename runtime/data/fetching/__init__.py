"""How samples become batches, also in loader processes. Knows no step."""
