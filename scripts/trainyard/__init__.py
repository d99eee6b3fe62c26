"""Trainyard: build, check, publish and run container images for training. Nothing of it runs inside an image."""

__version__ = "0.1.0"
