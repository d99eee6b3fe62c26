"""`python3 -I -S launcher ...` from a checkout or a zip archive; `launcher.__main__.main()` in an image."""

from __future__ import annotations

import sys


def _as_package() -> None:
    """Make this folder (or zip) importable as `launcher` when it was started by its path.

    Python then puts the folder itself on `sys.path`, where a module of ours could shadow one of the standard
    library; the entry is taken off again.
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
        the exit status, when nothing was exec'ed: 0 for `--print-env`, `--explain`, `--help`; 1, 2, 138, 126 or 127
        after one line on stderr; under PID 1 duties the trainer's own. After a successful exec it does not return.
    """
    if not __package__ and "launcher" not in sys.modules:
        _as_package()
    from launcher.cli import run

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
