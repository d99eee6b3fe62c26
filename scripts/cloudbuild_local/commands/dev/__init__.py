"""Commands of this package in the group ``dev``."""
