"""What one process knows of its run. Knows neither data nor models."""
