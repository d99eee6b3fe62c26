"""Share what all trainers need and what needs no framework: options, data formats, what runs a training."""
