"""What a person starts. Knows everything but the commands."""
