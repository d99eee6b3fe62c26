"""Schemas of the platforms' APIs."""
