"""Handwritten digits: the data, a network, and its training."""
