"""What runs outside the images: one module a verb, and what the verbs share. Nothing here is imported inside an image."""
