"""A package index on loopback: the simple API (https://packaging.python.org/en/latest/specifications/simple-repository-api/).

Its packages are wheels of :func:`wheel`, and whatever files a test adds.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from tests.fakes.server import Listener


def wheel(
    name: str,
    version: str,
    requires: tuple[str, ...] = (),
    tag: str = "py3-none-any",
    modules: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, bytes]:
    """Return file name and bytes of a wheel; ``modules``: path -> text of its files."""
    base = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    metadata = ["Metadata-Version: 2.2", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in sorted({*re.findall(r'extra == "(.+?)"', str(requires))})]
    metadata += [f"Requires-Dist: {one}" for one in requires]
    files = {
        **modules,
        f"{base}.dist-info/METADATA": "\n".join([*metadata, ""]),
        f"{base}.dist-info/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    # https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-record-file
    hashes = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for path, text in files.items()
    }
    rows = [f"{path},sha256={digest},{len(files[path].encode())}\n" for path, digest in hashes.items()]
    files[f"{base}.dist-info/RECORD"] = "".join([*rows, f"{base}.dist-info/RECORD,,\n"])
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return f"{base}-{tag}.whl", output.getvalue()


def source_distribution(name: str, version: str, files: dict[str, str]) -> tuple[str, bytes]:
    """File name and bytes of a source distribution with these files."""
    base = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{base}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return f"{base}.tar.gz", output.getvalue()


class PackageIndex(Listener):
    """An index that may ask for a user name and a password.

    It answers in JSON, with the size of each file, or in HTML, which has no sizes.

    Attributes:
        files: name of a file -> its bytes, ``uploaded``: -> when it was uploaded (RFC 3339), where that is known,
            ``yanked``: -> why it was withdrawn,
            ``claimed``: -> the SHA-256 that the index lists for it, where that is not that of its bytes.
        seen: paths that were asked for with valid credentials.
        refused: paths that were asked for without.
    """

    def __init__(self, credentials: tuple[str, str] | None = None, *, sizes: bool = True) -> None:
        self.files: dict[str, bytes] = {}
        self.uploaded: dict[str, str] = {}
        self.yanked: dict[str, str] = {}
        self.claimed: dict[str, str] = {}
        self.seen: list[str] = []
        self.refused: list[str] = []
        self._credentials = credentials
        self._media_type = "application/vnd.pypi.simple.v1+json" if sizes else "text/html"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """The class that answers a request."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # as in server.py

            def do_GET(self) -> None:
                fake._answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    @property
    def url(self) -> str:
        """The address of its simple API, without credentials."""
        return f"http://{self.host}/simple"

    @property
    def url_with_credentials(self) -> str:
        """The same with the user name and password."""
        assert self._credentials is not None
        return self.url.replace("://", f"://{':'.join(self._credentials)}@")

    def add(self, *files: tuple[str, bytes]) -> None:
        """Serve files, each a name and its bytes."""
        self.files |= dict(files)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        if self._credentials:
            pair = base64.b64encode(":".join(self._credentials).encode()).decode()
            if request.headers.get("Authorization") != f"Basic {pair}":
                self.refused.append(path)
                self._send(request, 401, b"", {"WWW-Authenticate": 'Basic realm="index"'})
                return
        self.seen.append(path)
        if path == "/simple/":
            names = sorted({canonicalize_name(file.split("-")[0]) for file in self.files})
            links = "".join(f'<a href="{name}/">{name}</a>' for name in names)
            self._send(request, 200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), {})
        elif re.search(r"\.html$|/pytorch-wheels/", path):  # a page of links, which has none
            self._send(request, 200, b"<!DOCTYPE html><html></html>", {"Content-Type": "text/html"})
        elif match := re.fullmatch(r"/(?:simple|whl(?:/nightly|/test)?/[a-z0-9.]+)/([^/.]+)/?", path):  # and PyTorch's
            page = self._page(match[1])
            self._send(request, 200 if page else 404, page, {"Content-Type": self._media_type})
        else:
            body = self.files.get(path.rsplit("/", 1)[-1])
            self._send(request, 404 if body is None else 200, body or b"", {})

    def _page(self, name: str) -> bytes:
        found = {
            file: (self.claimed.get(file, hashlib.sha256(body).hexdigest()), len(body))
            for file, body in sorted(self.files.items())
            if canonicalize_name(file.split("-")[0]) == canonicalize_name(name)
        }
        if not found:
            return b""
        if self._media_type == "text/html":
            links = [f'<a href="/files/{file}#sha256={digest}">{file}</a>' for file, (digest, _) in found.items()]
            return "\n".join(["<!DOCTYPE html><html><body>", *links, "</body></html>"]).encode()
        files = [
            {"filename": file, "url": f"/files/{file}", "hashes": {"sha256": digest}, "size": size}
            | ({"upload-time": self.uploaded[file]} if file in self.uploaded else {})
            | ({"yanked": self.yanked[file]} if file in self.yanked else {})
            for file, (digest, size) in found.items()
        ]
        # https://packaging.python.org/en/latest/specifications/simple-repository-api/#json-serialization
        versions = sorted({re.split(r"-|\.tar\.gz$", file)[1] for file in found})
        page = {"meta": {"api-version": "1.1"}, "name": canonicalize_name(name), "versions": versions, "files": files}
        return json.dumps(page).encode()

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)
