"""Fakes of the services that images use, each a self-contained file, and running them in containers."""
