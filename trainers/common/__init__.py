"""Code that all trainers share and that needs no framework: options, data formats, what runs a training."""
