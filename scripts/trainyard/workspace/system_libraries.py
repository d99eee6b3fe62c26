"""Tell which Debian packages the wheels of a repository need, before an image is built."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from trainyard.spec.catalog import brought, libraries
from trainyard.workspace import wheel_contents


def lacking(
    names: Iterable[str], base: str, system: Collection[str], of_target: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return the Debian packages that an image lacks, and why: ``opencv-python 5.0.0.93 loads libGL.so.1``.

    Nothing if a package is asked for whose libraries are not known.

    Args:
        names: canonical, of distributions.
        system: Debian packages that the user asks for, ``of_target``: those of the target.
    """
    known = wheel_contents.known()
    loading = sorted(name for name in names if name in known and known[name].libraries)
    of = libraries(base) if loading else {}
    if not {*system} <= brought(of.values()):
        return [], []
    there, packages, reasons = brought([*system, *of_target]), set[str](), []
    for name in loading:
        gone = [library for library in known[name].libraries if library in of and of[library] not in there]
        packages |= {of[library] for library in gone}
        reasons += [f"{name} {known[name].version} loads {', '.join(gone)}"] if gone else []
    # What another brings need not be asked for.
    rest = {name for name in packages if not any(name in brought([other]) for other in packages - {name})}
    return sorted(rest), reasons
