"""What is under this name in PyTorch."""
