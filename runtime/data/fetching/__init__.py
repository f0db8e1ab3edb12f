"""How samples become batches, in this process and in loader processes. Knows no step."""
