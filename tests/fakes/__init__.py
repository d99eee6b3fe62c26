"""Fakes of the services that the real clients are tested against."""
