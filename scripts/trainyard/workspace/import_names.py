"""Tell which distribution provides a module, by what is known of wheels.

An unknown name is not guessed: a distribution of the same name may be another's, or malicious.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from packaging.utils import canonicalize_name

from trainyard.workspace import wheel_contents
from trainyard.workspace.framework_table import table

#: Module -> the distribution to propose where several have it, or its newest no longer: cv2 without the libraries of a
#: desktop (https://github.com/opencv/opencv-python#installation-and-usage), pkg_resources before setuptools 82
#: (https://setuptools.pypa.io/en/latest/history.html#v82-0-0).
_FIRST = {
    "Crypto": "pycryptodome",
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "faiss": "faiss-cpu",
    "pkg_resources": "setuptools<82",
    "psycopg2": "psycopg2-binary",
    "pynvml": "nvidia-ml-py",
}

#: Version of Python -> modules that its standard library no longer has, but for distutils, which setuptools has:
#: https://docs.python.org/3/whatsnew/3.12.html#removed, https://peps.python.org/pep-0594/
_REMOVED = {
    "3.12": "asynchat asyncore imp smtpd",
    "3.13": "aifc audioop cgi cgitb chunk crypt imghdr lib2to3 mailcap nis nntplib ossaudiodev pipes sndhdr spwd sunau "
    "telnetlib uu xdrlib",
}

#: Parts of names that do not tell what a distribution is about.
_COMMON = frozenset({"python", "py", "lib", "cpu", "gpu", "core", "headless", "binary", "nightly"})


def root(module: str) -> str:
    """Return the part of a module's name that tells the distribution: the top-level module, or ``google.protobuf``."""
    parts = module.split(".")
    known = wheel_contents.providers()
    return next((name for end in (3, 2) if (name := ".".join(parts[:end])) in known), parts[0])


def removed(module: str) -> str:
    """Return the version of Python whose standard library has a module no longer; empty if there is none."""
    return next((version for version, names in _REMOVED.items() if module in names.split()), "")


def providers(module: str) -> list[str]:
    """Return the distributions that are known to provide a module, or a part of a namespace package such as google."""
    module = root(module)
    name = canonicalize_name(module)
    if name not in wheel_contents.known() and name in table().packages:  # the table of frameworks is read last
        return [name]
    return wheel_contents.providers().get(module) or wheel_contents.parts().get(module, [])


def proposed(module: str, preferred: Container[str] = ()) -> str:
    """Return the requirement to propose for a module; empty if none is known, or which of several the user wants."""
    module, names = root(module), providers(module)
    name = canonicalize_name(module)
    first = _FIRST.get(module) or (names[0] if len(names) == 1 else name if name in names else "")
    return next((one for one in names if one in preferred), first)


def names_backend(top: str) -> bool:
    """Return whether projects with several backends name their own files like a module: backend/jax.py, numpy.py."""
    name = proposed(top) or top
    return top == "numpy" or bool(table().needed(name)) or name in table().several


def is_provided(module: str, known: Container[str], listed: Iterable[str]) -> bool:
    """Return whether a distribution of ``known``, or a build of ``listed`` such as faiss-gpu-cu13, has a module.

    What is listed and not in the table counts as a build of another that its name resembles.
    """
    top, names = canonicalize_name(module.partition(".")[0]), providers(module)
    if top in known or any(name in known for name in names):
        return True
    words = _words(top, *names)
    return any(wheel_contents.is_open(name) and words & _words(name) for name in listed)


def _words(*names: str) -> set[str]:
    return {word for name in names for word in re.split(r"[-_.]", name)} - _COMMON
