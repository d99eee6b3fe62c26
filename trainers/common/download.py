"""Downloading a data set once, with mirrors, retries, checksums, a lock between processes and atomic renames."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from trainers.common import paths
from trainers.common.exits import UserError

_MAX_ATTEMPTS = 3  # times each mirror is tried
_PAUSE = 2.0  # seconds before the second attempt, doubled for each further one
_TIMEOUT = 20.0  # seconds without data


def fetch(folder: str, mirrors: Sequence[str], md5: Mapping[str, str], pause: float = _PAUSE) -> None:
    """Download the files of ``md5`` (name to checksum) that ``folder`` lacks, from the first mirror that works.

    Any number of processes may call this at the same time: one downloads, the others wait. ``pause`` is in seconds.
    Raises :class:`UserError` with the last error if all mirrors fail.
    """
    paths.make_folder(folder)
    with open(os.path.join(folder, ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, checksum in md5.items():
            path = os.path.join(folder, name)
            if not os.path.exists(path) and not os.path.exists(path.removesuffix(".gz")):
                _fetch_one(path, [mirror + name for mirror in mirrors], checksum, pause)


def _fetch_one(path: str, addresses: Sequence[str], checksum: str, pause: float) -> None:
    reason = ""
    for attempt in range(_MAX_ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        for address in addresses:
            try:
                print(f"Downloading {address}", file=sys.stderr)
                with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer, paths.atomic_file(path) as file:
                    shutil.copyfileobj(answer, file, 1 << 20)
                    file.seek(0)
                    found = hashlib.md5(file.read()).hexdigest()
                    if found != checksum:
                        raise ValueError(f"its MD5 is {found}, not {checksum}")
                return
            except (urllib.error.URLError, OSError, ValueError) as error:
                reason = f"{address}: {getattr(error, 'reason', error)}"
    raise UserError(f"cannot download {os.path.basename(path)} ({reason}); put the data into --datadir, or use"
                    " --fake-data")  # fmt: skip
