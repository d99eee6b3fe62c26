"""What the trainers share and needs no framework: flags, data formats, log lines, checkpoints, reports."""
