"""Addresses of nodes: host names, IPv4 and IPv6, with and without a port (R13.20)."""

from __future__ import annotations

from launcher.errors import config_error
from launcher.xrt import is_host, port_number

_HEX = frozenset("0123456789abcdefABCDEF")


def is_ipv6(word: str) -> bool:
    """Whether a word is the IPv6 address of a host (RFC 4291) without brackets; it may have a zone (`fe80::1%eth0`).

    By hand: importing `ipaddress` or `socket` takes longer than the rest of the start.
    """
    word, percent, zone = word.partition("%")
    if percent and not is_host(zone):
        return False
    head, tail = word, ""
    compressed = "::" in word
    if compressed:
        head, _, tail = word.partition("::")
        if "::" in tail or tail.startswith(":"):
            return False
    groups = (head.split(":") if head else []) + (tail.split(":") if tail else [])
    length = len(groups)
    if groups and "." in groups[-1]:  # ::ffff:10.0.0.1
        if not (_is_ipv4(groups.pop()) and (tail or not compressed)):
            return False
        length += 1
    if not all(0 < len(group) <= 4 and _HEX.issuperset(group) for group in groups):
        return False
    return 0 < length <= 7 if compressed else length == 8  # "::" is the address of no host


def _is_ipv4(word: str) -> bool:
    parts = word.split(".")
    return len(parts) == 4 and all(part.isascii() and part.isdigit() and int(part[:4]) < 256 for part in parts)


def is_address(word: str) -> bool:
    """Whether a word is a host name, an IPv4 address or an IPv6 address without brackets."""
    return is_host(word) or is_ipv6(word)


def without_port(value: str) -> str:
    """The host of "host:port", "[::1]:port", "[::1]" or "::1"; "" if the value is none of these."""
    host, port = _parts(value)
    return host if is_address(host) and (port is None or port_number(port)) else ""


def split(name: str, value: str) -> tuple[str, int]:
    """Host and port of a value such as "host:2222", "grpc://host:2222", "host", "::1" or "[::1]:2222".

    A value with two or more colons and no brackets is an IPv6 address without a port.

    Args:
        name: the variable, for the message.
        value: its value.

    Returns:
        the host without brackets, and the port; 0 if the value has none.

    Raises:
        LaunchError: (2) for anything else.
    """
    address = value[len("grpc://") :] if value.startswith("grpc://") else value
    host, port = _parts(address)
    if not is_address(host) or (port is not None and not port_number(port)):
        raise config_error(f"{name}: {value[:80]!r} is not host:port; write an IPv6 address with a port as [::1]:2222")
    return host, port_number(port or "")


def _parts(address: str) -> tuple[str, str | None]:
    """Host and port as they are written; the port is None if there is no colon for it."""
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not (bracket and is_ipv6(host)) or (rest and not rest.startswith(":")):
            return "", None
        return host, rest[1:] if rest else None
    if address.count(":") > 1:
        return (address, None) if is_ipv6(address) else ("", None)
    host, colon, port = address.partition(":")
    return host, port if colon else None


def join(host: str, port: int) -> str:
    """An address as "host:port"; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
