"""What an operation takes: tensors, and what the host reads. Knows no transport."""
