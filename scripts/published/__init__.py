"""What lies at a registry: images, the tags that move, and what is kept beside an image."""
