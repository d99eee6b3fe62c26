"""AI Platform Training."""
