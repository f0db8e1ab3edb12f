"""What a person types. Knows the whole runtime."""
