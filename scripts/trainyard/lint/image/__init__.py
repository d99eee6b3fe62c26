"""Rules for images, and ``trainyard verify``."""
