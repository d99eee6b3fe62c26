"""Entry point: `python3 -I -S launcher ...` in a checkout or a zip archive, `launcher.__main__.main()` in an image."""

from __future__ import annotations

import os
import sys


def _as_package() -> None:
    """Make this folder (or zip archive) importable as `launcher` when it was started by its path.

    Python has then put the folder itself on `sys.path`. It is removed again, because a module in it could shadow one
    of the standard library.
    """
    here = __file__.rpartition("/")[0] or "."
    if sys.path[0].rstrip("/") == here:
        del sys.path[0]
    package = type(sys)("launcher")
    package.__path__ = [here]
    package.__file__ = here + "/__init__.py"
    sys.modules["launcher"] = package


def main(argv: list[str] | None = None) -> int:
    """Run the launcher.

    Args:
        argv: arguments without the program's name; `sys.argv[1:]` when None.

    Returns:
        the exit status (R15.4): 0 for `--print-env`, `--explain`, `--version` and `--help`; 1, 2, 126, 127 or 138 after
        one line on stderr; the trainer's status if this process has started several processes. Does not return after a
        successful exec.
    """
    if not __package__ and "launcher" not in sys.modules:
        _as_package()
    words = sys.argv[1:] if argv is None else argv
    try:
        if os.getpid() == 1:
            from launcher import process

            process.become_child_of_tini(words)
        from launcher.cli import run

        return run(words)
    except KeyboardInterrupt:  # during the imports
        return 130


if __name__ == "__main__":
    sys.exit(main())
