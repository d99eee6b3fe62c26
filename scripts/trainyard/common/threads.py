"""Threads that an interrupted command does not wait for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class Threads(ThreadPoolExecutor):
    """Run functions that may wait for a registry: after Ctrl-C, neither the context nor ``__main__`` waits for them."""

    def __exit__(self, kind: object, *_: object) -> None:
        self.shutdown(wait=kind is not KeyboardInterrupt, cancel_futures=kind is KeyboardInterrupt)
