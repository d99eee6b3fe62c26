"""``trainyard``, and ``python -m trainyard``."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """The console script. An interrupt while the modules are imported ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from trainyard import cli

    status = cli.run(sys.argv[1:])
    if status == cli.INTERRUPTED:
        os._exit(status)  # Python would wait for trainyard.oci.transport.Threads
    sys.exit(status)


if __name__ == "__main__":
    main()
