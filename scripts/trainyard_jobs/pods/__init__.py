"""Cloud TPU VM slices: create them, run an image on every worker, follow the logs, restart after preemption, delete."""
