"""Rules for images and for job files, evaluated by one engine."""
