"""Cloud Build: its configuration, the plan rendered from the specs, what its steps run, and an executor for here."""
