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
        connection = socket.create_connection((host, port), timeout=max(timeout, 0.001))
        try:
            if secure:
                import ssl

                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
            lines = [f"GET {path} HTTP/1.0", f"Host: {where}", *(f"{key}: {headers[key]}" for key in headers)]
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            raw = _receive(connection, deadline)
        finally:
            connection.close()
    except socket.timeout:
        raise FetchError(f"{where} did not respond within {timeout:g} s") from None
    except UnicodeError:  # the IDNA codec of the resolver rejects labels that are too long
        raise FetchError(f"{host!r} is not a host name") from None
    except OSError as error:
        raise FetchError(f"{where}: {error.strerror or type(error).__name__}") from None
    return _parse(raw, where)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Read until the connection closes or the body is complete."""
    raw = b""
    while len(raw) < MAX_RESPONSE:
        left = deadline - time.monotonic()
        if left <= 0:
            raise socket.timeout
        connection.settimeout(left)
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
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def _parse(raw: bytes, where: str) -> tuple[int, bytes]:
    head, separator, body = raw.partition(b"\r\n\r\n")
    words = head.split(b"\r\n")[0].split()
    if not (separator and len(words) >= 2 and words[0].startswith(b"HTTP/") and words[1].isdigit()):
        raise FetchError(f"the response of {where} is not HTTP")
    if len(words[1]) != 3:
        raise FetchError(f"the response of {where} has an invalid HTTP status")
    length = _header(head, b"content-length")
    if length.isdigit() and len(body) < int(length[:9]):
        raise FetchError(f"{where} closed the connection before the end of its response")
    if _header(head, b"transfer-encoding").lower() == b"chunked":
        body = _join_chunks(body, where)
    return int(words[1]), body


def _join_chunks(raw: bytes, where: str) -> bytes:
    body = b""
    while True:
        line, separator, raw = raw.partition(b"\r\n")
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            size = -1
        if not separator or size < 0 or len(raw) < size:
            raise FetchError(f"{where} closed the connection before the end of its response")
        if size == 0:
            return body
        body += raw[:size]
        raw = raw[size + 2 :]
