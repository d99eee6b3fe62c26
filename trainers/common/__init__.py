"""Code that all trainers share and that needs no framework: flags, data formats, logs, checkpoints, reports."""
