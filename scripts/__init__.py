"""What runs outside the images: one module a verb, and what the verbs share. Never imported inside an image."""
