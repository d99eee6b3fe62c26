"""HTTP GET over plain sockets, with one deadline for the whole request (R12.4).

Importing `http.client` takes three times as long as the launcher's start, and its time limit applies to each read, so
a server that sends one byte at a time could delay it without limit. Here one deadline covers everything from connect to
last byte, the size of a response is limited, and TLS is imported for https only. Requests are HTTP/1.0, so a response
ends with the connection; chunked responses are accepted too.
"""

from __future__ import annotations

import socket
import time

MAX_RESPONSE = 1 << 20  # bytes; the description of a node has about 2 kB


class FetchError(Exception):
    """No HTTP response: DNS lookup, connection, TLS, time limit or a malformed response. Always transient."""


def split_url(url: str) -> tuple[bool, str, int, str]:
    """Split an http or https URL into (secure, host, port, path).

    Raises:
        ValueError: it is not such a URL.
    """
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.partition(":")
    if not separator or scheme not in ("http", "https") or not host or "@" in authority:
        raise ValueError("not http://HOST[:PORT] or https://HOST[:PORT]")
    if not all(33 <= ord(character) < 127 for character in url):
        raise ValueError("it contains a character that is not allowed in a URL")
    if colon and not (port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError("the port must be a number from 1 to 65535")
    secure = scheme == "https"
    return secure, host, int(port) if colon else (443 if secure else 80), slash + path or "/"


def get(url: str, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
    """GET a URL; redirects are not followed.

    Args:
        url: an http or https URL, see `split_url`.
        headers: request headers; `Host` is added.
        timeout: seconds from start to last byte. Only the DNS lookup may exceed it.

    Returns:
        HTTP status and body.

    Raises:
        FetchError: no well-formed response in time.
    """
    secure, host, port, path = split_url(url)
    deadline = time.monotonic() + timeout
    where = f"{host}:{port}"
    try:
        connection = _connect(host, port, deadline)
        try:
            if secure:
                import ssl

                connection.settimeout(_left(deadline))
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
            lines = [f"GET {path} HTTP/1.0", f"Host: {where}", *(f"{key}: {headers[key]}" for key in headers)]
            connection.settimeout(_left(deadline))
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            raw = _receive(connection, deadline)
        finally:
            connection.close()
        return _parse(raw, where, deadline)
    except socket.timeout:
        raise FetchError(f"{where} did not respond within {timeout:g} s") from None
    except UnicodeError:  # the IDNA codec of the resolver rejects labels that are too long
        raise FetchError(f"{host!r} is not a host name") from None
    except OSError as error:
        raise FetchError(f"{where}: {error.strerror or type(error).__name__}") from None


def _left(deadline: float) -> float:
    """Return the seconds until the deadline. Raise `socket.timeout` after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise socket.timeout
    return left


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first address that answers. `socket.create_connection` would take the whole time for each."""
    failure = OSError(f"{host} has no address")
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_connection((str(address[0]), port), timeout=_left(deadline))
        except OSError as error:
            failure = error
    raise failure


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Read until the connection closes or the body is complete."""
    raw = b""
    while len(raw) < MAX_RESPONSE:
        connection.settimeout(_left(deadline))
        piece = connection.recv(65536)
        if not piece:
            break
        raw += piece
        head, separator, body = raw.partition(b"\r\n\r\n")
        length = _header(head, b"content-length") if separator else b""
        if length.isdigit() and len(body) >= int(length[:9]):
            break
    return raw


def _header(head: bytes, name: bytes) -> bytes:
    """Return the value of a header in lower case; "" without it."""
    return head.lower().partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0].strip()


def _parse(raw: bytes, where: str, deadline: float) -> tuple[int, bytes]:
    head, separator, body = raw.partition(b"\r\n\r\n")
    words = head.split(b"\r\n")[0].split()
    if not (separator and len(words) >= 2 and words[0].startswith(b"HTTP/") and words[1].isdigit()):
        raise FetchError(f"the response of {where} is not HTTP")
    if len(words[1]) != 3:
        raise FetchError(f"the response of {where} has an invalid HTTP status")
    length = _header(head, b"content-length")
    if length.isdigit() and len(body) < int(length[:9]):
        raise FetchError(f"{where} closed the connection before the end of its response")
    if _header(head, b"transfer-encoding") == b"chunked":
        body = _join_chunks(body, where, deadline)
    return int(words[1]), body


def _join_chunks(raw: bytes, where: str, deadline: float) -> bytes:
    body = bytearray()
    start = 0
    while True:
        _left(deadline)
        end = raw.find(b"\r\n", start)
        try:
            size = int(raw[start:end].split(b";")[0], 16) if end >= 0 else -1
        except ValueError:
            size = -1
        start = end + 2 + size
        if size < 0 or start > len(raw):
            raise FetchError(f"{where} closed the connection before the end of its response")
        if size == 0:
            return bytes(body)
        body += raw[end + 2 : start]
        start += 2
