"""Rules for job files that several platforms share, and the evidence that they look at."""
