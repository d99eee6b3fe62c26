"""``python -m trainyard`` is ``trainyard``."""

from trainyard.cli import main

main()
