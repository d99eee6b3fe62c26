"""Keep output and errors of the processes of a node in files, as torchrun does (R15.8)."""

from __future__ import annotations

import json
import os

from launcher.errors import config_error
from launcher.host import regular
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Iterable, Mapping

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
MAX_FILE = 1 << 20
COPIED = 65536  # bytes read at once from a process


class Folders:
    """Make a folder for each rank: `attempt_N/RANK` below LAUNCHER_LOG_DIR, else a temporary one, for its error file.

    Args:
        root: LAUNCHER_LOG_DIR; "" for temporary folders, without which the processes run all the same.
        ranks: those of this node. N is the first number for which no folder of the first rank exists.
        env: TMPDIR.

    Raises:
        LaunchError: (2) if the folder cannot be written.
    """

    def __init__(self, root: str, ranks: list[str], env: Mapping[str, str]) -> None:
        self.of: dict[str, str] = {}
        self._temporary = "" if root else f"{text(env, 'TMPDIR') or '/tmp'}/launch-{os.urandom(8).hex()}"
        number = 0
        while root and os.path.exists(f"{root}/attempt_{number}/{ranks[0]}"):
            number += 1
        try:
            if self._temporary:
                os.mkdir(self._temporary, 0o700)
            for rank in ranks:
                folder = f"{root}/attempt_{number}/{rank}" if root else f"{self._temporary}/{rank}"
                os.makedirs(folder)
                self.of[rank] = folder
                for name in ("stdout", "stderr") if root else ():
                    open(f"{folder}/{name}.log", "xb").close()  # fails now, before the first process is started
        except OSError as error:
            if root:
                raise config_error(
                    f"LAUNCHER_LOG_DIR is {root[:200]!r}: {error.strerror}; name a folder that can be written"
                ) from None

    def first_error(self) -> str:
        """Return the error with the least timestamp that a process has written, as one line; "" without one.

        `@record` of torch.distributed.elastic writes the exception that ended a program.
        """
        found = []
        for rank, folder in self.of.items():
            try:
                with open(f"{folder}/error.json", "rb", opener=regular) as file:
                    message = json.loads(file.read(MAX_FILE).decode("utf-8"))["message"]
                time, stack = int(message["extraInfo"]["timestamp"]), message["extraInfo"]["py_callstack"]
                # '  File "/workspace/train.py", line 12, in main'
                frames = [line.split('"') for line in stack.splitlines() if line.startswith('  File "')]
                where = [f"{words[1]}:{words[2].split()[2].rstrip(',')}" for words in frames[-1:]]
                where += [] if self._temporary else [f"{folder}/error.json"]
                said = " ".join(str(message["message"]).split())[:400]
                found.append((time, f"rank {rank}: {said} ({', '.join(where) or 'no call stack'})"))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue
        return min(found)[1] if found else ""

    def close(self) -> None:
        """Remove temporary folders."""
        for folder in [*self.of.values(), self._temporary] if self._temporary else ():
            try:
                if os.path.exists(f"{folder}/error.json"):
                    os.unlink(f"{folder}/error.json")
                os.rmdir(folder)
            except OSError:
                continue


class Copier:
    """Copy a pipe to a stream of the launcher, each line with a prefix if there is one, and to a file.

    Args:
        source: the pipe's read end.
        stream: 1 or 2.
        prefix: start of every line; "" to copy the output as it is.
        file: path of the file; "" for none.
    """

    def __init__(self, source: int, stream: int, prefix: str, file: str) -> None:
        self._source = source
        self._stream = stream
        self._prefix = prefix.encode()
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND) if file else None

    def start(self, lock: threading.Lock) -> None:
        """Start copying. All share the lock, because a pipe takes more than 4096 bytes in parts (pipe(7))."""
        import threading

        self._lock = lock
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        rest = b""
        while True:
            piece = os.read(self._source, COPIED)
            out: Iterable[bytes] = [piece]
            if self._prefix:
                # A progress bar ends its lines with a carriage return.
                *lines, rest = (rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
                if not piece and rest:
                    lines.append(rest)
                out = (self._prefix + line + b"\n" for line in lines)
            with self._lock:
                _write(self._stream, b"".join(out))
            if self._file is not None:
                _write(self._file, piece)
            if not piece:
                return

    def join(self) -> None:
        """Wait for the last line, but not for a process left behind that holds the pipe open."""
        self._thread.join(1.0)


def _write(target: int, text: bytes) -> None:
    try:
        while text:
            text = text[os.write(target, text) :]
    except OSError:
        return  # the reader is gone, or the disk is full; the process must not stop at a full pipe
