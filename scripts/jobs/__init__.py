"""Job configurations: what they may say, and how they are written, checked and submitted."""
