"""What is in an image, without running it as its user would: layers, files, packages, secrets."""
