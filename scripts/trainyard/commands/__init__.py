"""One module per command of ``trainyard``: it declares options, calls a library, and prints.

Imported by :mod:`trainyard.cli` alone. No command imports another.
"""
