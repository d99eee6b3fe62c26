"""Run a command, and print how much memory it took at most: the smoke test copies this file to its volume.

Standard library only, Python 3.8 to 3.14. The last line of the output is JSON, ``{"peak_memory": <bytes>}``: of the
largest of the command's processes. SIGTERM is passed on.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys


def main(words: list[str]) -> int:
    """Run a command, and return its exit status, which is 128 and more after a signal."""
    command = subprocess.Popen(words)
    signal.signal(signal.SIGTERM, lambda number, _frame: command.send_signal(number))
    status = command.wait()
    print(json.dumps({"peak_memory": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024}), flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
