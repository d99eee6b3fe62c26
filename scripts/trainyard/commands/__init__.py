"""One module per command of ``trainyard``: it declares options, calls a library, and prints.

``image.py`` is ``trainyard image``; ``dev/build.py`` is ``trainyard dev build``, and ``trainyard dev build`` for short.
Imported by :mod:`trainyard.cli` alone. No command imports another.
"""
