"""The sizes of the files in locked wheels, without downloading the wheels.

A wheel is a zip archive: the directory at its end lists every file with its size, and package indexes serve parts of
files (HTTP range requests).
"""

from __future__ import annotations

import io
import zipfile

import requests

from trainyard.common.errors import StepFailed
from trainyard.image import resolver
from trainyard.image.resolution import Resolution
from trainyard.image.resolver import default_index
from trainyard.spec.lock import versions
from trainyard.spec.model import Spec

#: Bytes per request; the directory of torch's wheel has 2 MB.
_PART = 1 << 20

#: Seconds to wait for an answer.
_TIMEOUT = 30


class _Remote(io.RawIOBase):
    """A remote file that is read with range requests."""

    def __init__(self, session: requests.Session, url: str) -> None:
        self._session, self._url, self._at = session, url, 0
        answer = session.head(url, timeout=_TIMEOUT, allow_redirects=True)
        answer.raise_for_status()
        self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._size) - 1
        if end < self._at:
            return 0
        headers = {"Range": f"bytes={self._at}-{end}"}
        answer = self._session.get(self._url, headers=headers, timeout=_TIMEOUT)
        answer.raise_for_status()
        if answer.status_code != 206:
            raise requests.exceptions.InvalidHeader("the index does not support range requests")
        buffer[: len(answer.content)] = answer.content
        self._at += len(answer.content)
        return len(answer.content)


def addresses(spec: Spec, index: str) -> dict[str, str]:
    """Return canonical name -> address of the wheel that uv would install for each package of the framework.

    Raises:
        StepFailed: uv could not resolve them; the message ends with its error.
    """
    locked = resolver.pins(versions(spec.locked(index).framework))
    found = Resolution([spec], indexes=default_index()).packages(locked, alone=True)
    return {pin.name: file.url for pin in found[spec.arch] for file in pin.files[:1] if file.is_wheel}


def files(url: str, session: requests.Session) -> dict[str, int]:
    """Path -> bytes of every file that a wheel installs below its site directory.

    Raises:
        StepFailed: the index does not answer, or does not support range requests.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_Remote(session, url), _PART)) as wheel:
            return {entry.filename: entry.file_size for entry in wheel.infolist()}
    except (requests.exceptions.RequestException, zipfile.BadZipFile, KeyError, OSError) as error:
        raise StepFailed(f"cannot read the directory of {url.rsplit('/', 1)[-1]}: {str(error)[:200]}") from None
