"""Addresses of nodes: host names, IPv4 and IPv6, with and without a port (R13.20)."""

from __future__ import annotations

from launcher.errors import config_error

_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


def is_host(word: str) -> bool:
    """Return whether a word is a host name or an IPv4 address as XRT allows it: `[a-zA-Z0-9_\\-\\.]+` (R2.1)."""
    return bool(word) and _HOST_CHARACTERS.issuperset(word)


def is_ipv6(word: str) -> bool:
    """Return whether a word is an IPv6 address (RFC 4291) without brackets; it may have a zone (`fe80::1%eth0`)."""
    word, percent, zone = word.partition("%")
    if ":" not in word or (percent and not is_host(zone)):
        return False
    import socket  # takes longer than the rest of the start

    try:
        return any(socket.inet_pton(socket.AF_INET6, word))  # "::" is the address of no host
    except (OSError, ValueError):
        return False


def port_number(word: str) -> int:
    """Return the TCP port in a text; 0 if it is not one."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 5 and 0 < int(word) < 65536 else 0


def is_address(word: str) -> bool:
    """Return whether a word is a host name, an IPv4 address or an IPv6 address without brackets."""
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
