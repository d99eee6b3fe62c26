"""The syntax of names, labels and quantities in Kubernetes objects.

Each function returns what is wrong, in words, or an empty string. Sources:
https://kubernetes.io/docs/concepts/overview/working-with-objects/names,
https://github.com/kubernetes/apimachinery/blob/master/pkg/util/validation/validation.go and
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity.
"""

from __future__ import annotations

import re
from fractions import Fraction

from trainyard.spec.yaml_source import LONGEST_NUMBER

#: Most characters of a label, in the sense of DNS and of Kubernetes.
LABEL = 63
_SUBDOMAIN = 253

_POWERS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}

_LETTERS = "use letters, digits, '-', '_' and '.', with a letter or digit at both ends"

#: The end of a name of lowercase letters, digits and dashes.
_REST = "([-a-z0-9]*[a-z0-9])?"


def _wrong(text: str, form: str, words: str, most: int) -> str:
    """Return ``words`` if a text has another form, or how much longer than ``most`` characters it is."""
    if not re.fullmatch(form, text):
        return words
    return f"{len(text)} characters; at most {most}" if len(text) > most else ""


def dns_1123_label(text: str) -> str:
    """A name of a pod, container, volume or namespace."""
    words = "use a-z, 0-9 and dashes, with a letter or digit at both ends"
    return _wrong(text, f"[a-z0-9]{_REST}", words, LABEL)


def dns_1035_label(text: str) -> str:
    """A name of a JobSet's Jobs, or of a Service."""
    words = "use a-z, 0-9 and dashes, with a letter first and a letter or digit last"
    return _wrong(text, f"[a-z]{_REST}", words, LABEL)


def dns_1123_subdomain(text: str) -> str:
    """A name of most objects: labels of a DNS name, with dots between them."""
    words = "use a-z, 0-9, dashes and dots, with a letter or digit at both ends of each part"
    return _wrong(text, rf"[a-z0-9]{_REST}(\.[a-z0-9]{_REST})*", words, _SUBDOMAIN)


def qualified_name(text: str) -> str:
    """A key of a label, annotation or resource: a name, after an optional DNS name and a slash."""
    prefix, slash, name = text.rpartition("/")
    if slash and (dns_1123_subdomain(prefix)):
        return f"'{prefix}' before the slash is no DNS name"
    return label_value(name) if name else _LETTERS


def label_value(text: str) -> str:
    """A value of a label; it may be empty."""
    return _wrong(text, "([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", _LETTERS, LABEL)


def domain_prefixed_path(text: str) -> str:
    """A controller's name, such as ``acme.io/foo``."""
    host, _, path = text.partition("/")
    if not host or not path:
        return "use a domain-prefixed path, such as acme.io/foo"
    if dns_1123_subdomain(host):
        return f"'{host}' before the slash is no DNS name"
    return "" if re.fullmatch(r"[A-Za-z0-9/\-._~%!$&'()*+,;=:]+", path) else f"'{path}' is no path"


def port_name(text: str) -> str:
    """A name of a container's port (RFC 6335 service name)."""
    if len(text) > 15:
        return f"{len(text)} characters; at most 15"
    valid = re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", text) and re.search("[a-z]", text) and "--" not in text
    return "" if valid else "use a-z, 0-9 and single dashes, with at least one letter"


def generated(prefix: str) -> str:
    """A name as the API server makes it of ``generateName``: cut to 58 characters, and 5 random ones.

    https://github.com/kubernetes/apiserver/blob/master/pkg/storage/names/generate.go
    """
    return prefix[: LABEL - 5] + "abcde"


def quantity(value: object) -> Fraction | None:
    """A resource quantity, such as ``500m``, ``64Gi`` or ``8``; None if it is none."""
    match = re.fullmatch(
        r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3}|)", str(value)
    )  # fmt: skip
    if not match or isinstance(value, bool) or len(match[0]) > LONGEST_NUMBER:
        return None
    number, suffix = Fraction(match[1].rstrip(".") if match[1].rstrip(".") else "0"), match[2]
    if suffix in _BINARY:
        return number * int(1024 ** _BINARY[suffix])
    if suffix in _POWERS:
        return number * Fraction(10) ** _POWERS[suffix]
    return number * Fraction(10) ** int(suffix[1:])
