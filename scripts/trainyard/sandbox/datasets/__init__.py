"""Data to train on without a network: real digits and drawn flowers."""
