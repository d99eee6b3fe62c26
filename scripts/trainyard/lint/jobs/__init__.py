"""Rules for job files, and ``trainyard check-job``."""
