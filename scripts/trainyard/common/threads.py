"""Threads that an interrupted command does not wait for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType


class Threads(ThreadPoolExecutor):
    """Run functions that may wait for a registry, a minute for each of its answers.

    After Ctrl-C the context ends at once, and ``trainyard`` ends without the threads that still wait (``__main__``).
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.shutdown(wait=not interrupted, cancel_futures=interrupted)
