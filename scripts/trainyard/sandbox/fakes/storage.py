#!/usr/bin/env python3
"""A fake Cloud Storage over a folder: FOLDER/BUCKET/path/of/object, readable and writable as ordinary files.

One self-contained file that needs only the standard library: it runs in a container of any image with Python,

    python3 -I -S storage.py FOLDER --host 0.0.0.0 --port 9000 [--certificate FILE.pem --tls-port 443]

or inside a test: ``with Storage(folder) as storage: os.environ["STORAGE_EMULATOR_HOST"] = storage.url``.

It supports what the clients of training images use (tests/image/test_rehearse.py runs them against it):

* gcsfs (fsspec) and google-cloud-storage through STORAGE_EMULATOR_HOST: the JSON API's objects (get, list, insert by
  media, multipart and resumable upload, delete, patch, copyTo, rewriteTo, moveTo, compose), buckets, and batches;
* TensorFlow's tf.io.gfile and tf.data, which support no emulators, only www.googleapis.com and storage.googleapis.com:
  give the server those names on the network, a certificate for them, and the clients CURL_CA_BUNDLE.

Differences from the real service: no access control, except that --refuse refuses every request; no versions (a
generation is the file's time); metadata of objects is not stored; and a name cannot be an object and a folder of other
objects at the same time, because a file cannot (409).
"""

from __future__ import annotations

import argparse
import base64
import datetime
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import ssl
import stat
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

#: Bytes read or written at a time.
BLOCK = 1 << 20
#: Folder of unfinished uploads, next to the buckets; no bucket's name starts with a dot.
UPLOADS = ".uploads"
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class Refused(Exception):
    """An error answer: HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Bucket:
    """One bucket: the folder of its name."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.folder = root / name
        if not BUCKET.fullmatch(name) or not self.folder.is_dir():
            raise Refused(404, f"The specified bucket does not exist: {name} (a folder of that name in {root})")

    def path(self, name: str) -> Path:
        """The file of an object.

        Raises:
            Refused: (400) the name leads out of the bucket or cannot be a file's.
        """
        parts = name.rstrip("/").split("/")
        if not name or "\0" in name or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
            raise Refused(400, f"{name!r} cannot be a file: empty parts, . and .. are not possible here")
        return self.folder.joinpath(*parts)

    def existing(self, name: str) -> Path:
        """The file of an existing object; a folder counts as the empty object ``name/`` that marks it."""
        path = self.path(name)
        if path.is_dir() == name.endswith("/") and path.exists():
            return path
        raise Refused(404, f"No such object: {self.name}/{name}")

    def names(self, prefix: str) -> Iterator[str]:
        """Names of the objects that start with ``prefix``, sorted as Cloud Storage does."""
        start = self.folder.joinpath(*[part for part in prefix.split("/")[:-1] if part not in ("", ".", "..")])
        found = []
        for folder, folders, files in os.walk(start):
            inner = Path(folder).relative_to(self.folder).as_posix()
            found += [name if inner == "." else f"{inner}/{name}" for name in files]
            if not folders and not files and inner != ".":
                found.append(f"{inner}/")
        return iter(sorted(name for name in found if name.startswith(prefix)))

    def describe(self, name: str, root: str) -> dict[str, object]:
        """An object's resource."""
        path = self.existing(name)
        about = path.stat()
        generation = str(about.st_mtime_ns // 1000)
        date = formatdate(about.st_mtime)
        moment = _rfc3339(about.st_mtime)
        return {
            "kind": "storage#object",
            "id": f"{self.name}/{name}/{generation}",
            "name": name,
            "bucket": self.name,
            "generation": generation,
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": "0" if path.is_dir() else str(about.st_size),
            "timeCreated": moment,
            "updated": moment,
            "etag": base64.b64encode(date.encode()).decode(),
            "mediaLink": f"{root}/download/storage/v1/b/{self.name}/o/{quote(name, safe='')}?alt=media",
        }

    def described_with_hash(self, name: str, root: str) -> dict[str, object]:
        """The same with md5Hash, which clients check after an upload."""
        found = self.describe(name, root)
        path = self.path(name)
        digest = hashlib.md5(usedforsecurity=False)
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
        found["md5Hash"] = base64.b64encode(digest.digest()).decode()
        return found

    def publish(self, temporary: Path, name: str) -> None:
        """Make an upload the object ``name``, all at once."""
        path = self.path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _open_to_all(path.parent, self.folder)
            if name.endswith("/"):
                temporary.unlink()
                path.mkdir(exist_ok=True)
                _open_to_all(path, self.folder)
                return
            temporary.chmod(0o666)  # the trainer, another user, may rewrite it through /gcs
            os.replace(temporary, path)
        except (IsADirectoryError, NotADirectoryError, FileExistsError):
            temporary.unlink(missing_ok=True)
            raise Refused(409, f"{name!r} or a part of it is an object and a folder at once: no files can be") from None

    def delete(self, name: str) -> None:
        """Remove an object, and the folders that only existed for it."""
        path = self.existing(name)
        if path.is_dir():
            if any(path.iterdir()):
                return  # only the marker is removed, not the folder's contents
            path.rmdir()
        else:
            path.unlink()
        for parent in path.parents:
            if parent == self.folder or any(parent.iterdir()):
                break
            parent.rmdir()


def _open_to_all(folder: Path, top: Path) -> None:
    """Let every user of the containers write to ``folder`` and its parents below ``top``, as in Cloud Storage FUSE."""
    while folder != top:
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o777)
        folder = folder.parent


def _rfc3339(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # noqa: UP017


class Storage:
    """The fake, startable in a thread.

    Args:
        folder: holds a folder for each bucket.
        host, port: where to listen for HTTP; port 0 takes a free one.
        certificate, tls_port: a PEM file with key and certificate, and where to listen for HTTPS with it.
        refuse: the HTTP status that every request gets, such as 403; 0 for none. It may change while the server runs.
        delay: seconds before each request is answered, as over a network: about 0.02 in a bucket's own region.
    """

    def __init__(
        self,
        folder: Path | str,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: str = "",
        tls_port: int = 443,
        refuse: int = 0,
        delay: float = 0.0,
    ) -> None:
        self.root = Path(folder)
        self.uploads = self.root / UPLOADS
        shutil.rmtree(self.uploads, ignore_errors=True)
        self.uploads.mkdir(parents=True)
        self.sessions: dict[str, tuple[str, str]] = {}
        self.host = host
        self.refuse = refuse
        self.delay = delay
        handler = type("Handler", (_Handler,), {"storage": self})
        self._servers = [ThreadingHTTPServer((host, port), handler)]
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server = ThreadingHTTPServer((host, tls_port), handler)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            self._servers.append(server)
        for server in self._servers:
            server.daemon_threads = True
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True) for server in self._servers
        ]

    @property
    def port(self) -> int:
        """The port it listens on for HTTP."""
        return int(self._servers[0].server_address[1])

    @property
    def url(self) -> str:
        """http://host:port, for STORAGE_EMULATOR_HOST."""
        return f"http://{self.host}:{self.port}"

    def serve(self) -> None:
        """Serve until the process ends."""
        with self:
            threading.Event().wait()

    def __enter__(self) -> Storage:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        shutil.rmtree(self.uploads, ignore_errors=True)

    def bucket(self, name: str) -> Bucket:
        """An existing bucket. Raises Refused (404)."""
        return Bucket(self.root, name)

    def new_upload(self) -> tuple[str, Path]:
        """An upload's id, and the file with its bytes so far."""
        upload = secrets.token_hex(8)
        return upload, self.uploads / upload


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "FakeStorage"
    sys_version = ""
    disable_nagle_algorithm = True

    storage: Storage

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError, TimeoutError):
            self.close_connection = True

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    @property
    def root_url(self) -> str:
        """The URL of this server as the client addresses it."""
        scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
        return f"{scheme}://{self.headers.get('Host')}"

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        # TensorFlow's client sends both headers; the body is chunked then (RFC 9112, 6.3).
        self.is_chunked = "chunked" in (self.headers.get("Transfer-Encoding") or "").lower()
        self.body_left = 0 if self.is_chunked else int(self.headers.get("Content-Length") or 0)
        time.sleep(self.storage.delay)
        try:
            if self.storage.refuse:
                raise Refused(self.storage.refuse, "refused, as every request (--refuse)")
            self._route(url.path)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            raise
        except (Refused, OSError, ValueError, KeyError) as found:
            error = found if isinstance(found, Refused) else Refused(500, f"{type(found).__name__}: {found}")
            self._drain()
            self._json({"error": {"code": error.status, "message": str(error), "errors": [{"message": str(error)}]}},
                       error.status)  # fmt: skip

    def _route(self, path: str) -> None:
        for pattern, method in (
            (r"/(?:upload|resumable/upload)/storage/v1/b/([^/]+)/o", self._upload),
            (r"/batch(?:/storage/v1)?", self._batch),
            (r"/(?:download/)?storage/v1/b/([^/]+)/o/(.+)", self._object),
            (r"/storage/v1/b/([^/]+)/o/?", self._list),
            (r"/storage/v1/b/([^/]+)", self._bucket),
            (r"/storage/v1/b/?", self._buckets),
            (r"/((?!storage/|upload/)[^/]+)/(.+)", self._media),
        ):
            match = re.fullmatch(pattern, path)
            if match:
                method(*map(unquote, match.groups()))
                return
        raise Refused(404, f"no such page: {path}")

    # --- buckets -------------------------------------------------------------------------------------------

    def _buckets(self) -> None:
        if self.command == "POST":
            name = json.loads(self._body() or b"{}").get("name", "")
            if not BUCKET.fullmatch(name):
                raise Refused(400, f"Invalid bucket name: {name!r}")
            folder = self.storage.root / name
            if folder.exists():
                raise Refused(409, "Your previous request to create the named bucket succeeded and you already own it.")
            folder.mkdir()
            folder.chmod(0o777)
            self._json(_bucket_resource(name))
            return
        names = sorted(path.name for path in self.storage.root.iterdir() if BUCKET.fullmatch(path.name))
        self._json({"kind": "storage#buckets", "items": [_bucket_resource(name) for name in names]})

    def _bucket(self, name: str) -> None:
        bucket = self.storage.bucket(name)
        if self.command == "DELETE":
            if any(bucket.folder.iterdir()):
                raise Refused(409, "The bucket you tried to delete is not empty.")
            bucket.folder.rmdir()
            self._send(204)
            return
        self._drain()
        self._json(_bucket_resource(name))

    # --- objects -------------------------------------------------------------------------------------------

    def _list(self, bucket_name: str) -> None:
        bucket = self.storage.bucket(bucket_name)
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        most = int(self.query.get("maxResults") or 1000)
        after = self.query.get("pageToken", "")
        start = self.query.get("startOffset", "")
        items: list[str] = []
        prefixes: list[str] = []
        following = ""
        for name in bucket.names(prefix):
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            entry = prefix + head + delimiter if found else name
            is_prefix = bool(found)
            if (after and entry <= after) or (start and name < start) or (is_prefix and prefixes[-1:] == [entry]):
                continue
            if len(items) + len(prefixes) == most:
                following = max(items[-1:] + prefixes[-1:], default="")
                break
            (prefixes if is_prefix else items).append(entry)
        answer: dict[str, object] = {"kind": "storage#objects"}
        if items:
            answer["items"] = [bucket.describe(name, self.root_url) for name in items]
        if prefixes:
            answer["prefixes"] = prefixes
        if following:
            answer["nextPageToken"] = following
        self._json(answer)

    def _object(self, bucket_name: str, rest: str) -> None:
        raw = self.path.partition("?")[0].partition("/b/")[2].partition("/o/")[2]  # as it was sent
        copying = re.fullmatch(r"([^/]+)/(copyTo|rewriteTo)/b/([^/]+)/o/([^/]+)", raw)
        if copying and self.command == "POST":
            self._copy(bucket_name, *map(unquote, copying.groups()))
            return
        moving = re.fullmatch(r"([^/]+)/moveTo/o/([^/]+)", raw)
        if moving and self.command == "POST":
            name, to_name = map(unquote, moving.groups())
            self._copy(bucket_name, name, "moveTo", bucket_name, to_name)
            return
        if raw.endswith("/compose") and self.command == "POST":
            self._compose(bucket_name, unquote(raw[: -len("/compose")]))
            return
        bucket = self.storage.bucket(bucket_name)
        if self.command == "DELETE":
            bucket.delete(rest)
            self._send(204)
        elif self.query.get("alt") == "media":
            self._media(bucket_name, rest)
        else:
            self._drain()  # metadata is not stored
            self._json(bucket.describe(rest, self.root_url))

    def _media(self, bucket_name: str, name: str) -> None:
        """An object's bytes, all or a range of them."""
        bucket = self.storage.bucket(bucket_name)
        if self.command == "PUT":
            self._put(bucket, name)
            return
        path = bucket.existing(name)
        size = 0 if path.is_dir() else path.stat().st_size
        first, last = 0, size - 1
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked and any(asked.groups()):
            first, last = (
                (int(asked[1]), min(int(asked[2] or size - 1), size - 1))
                if asked[1]
                else (max(0, size - int(asked[2])), size - 1)
            )
            if first >= size or first > last:
                self._send(416, headers={"Content-Range": f"bytes */{size}"})
                return
        about = bucket.describe(name, self.root_url)
        headers = {"X-Goog-Generation": str(about["generation"]), "ETag": str(about["etag"]), "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.send_response(206 if asked else 200)
        for key, value in {"Content-Type": "application/octet-stream", **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(max(0, last - first + 1)))
        self.end_headers()
        if self.command != "HEAD" and size:
            with path.open("rb") as file:
                file.seek(first)
                _copy_bytes(file, self.wfile, last - first + 1)

    def _put(self, bucket: Bucket, name: str) -> None:
        """The XML API's upload."""
        _, temporary = self.storage.new_upload()
        with temporary.open("wb") as file:
            self._read_into(file)
        bucket.publish(temporary, name)
        self._send(200)

    def _copy(self, bucket_name: str, name: str, how: str, to_bucket: str, to_name: str) -> None:
        self._drain()
        source = self.storage.bucket(bucket_name).existing(name)
        target = self.storage.bucket(to_bucket)
        _, temporary = self.storage.new_upload()
        if source.is_dir():
            temporary.touch()
        else:
            shutil.copyfile(source, temporary)
        size = str(temporary.stat().st_size)
        target.publish(temporary, to_name)
        resource = target.described_with_hash(to_name, self.root_url)
        if how == "moveTo":
            self.storage.bucket(bucket_name).delete(name)
        if how != "rewriteTo":
            self._json(resource)
        else:
            self._json({"kind": "storage#rewriteResponse", "done": True, "objectSize": size,
                        "totalBytesRewritten": size, "resource": resource})  # fmt: skip

    def _compose(self, bucket_name: str, name: str) -> None:
        bucket = self.storage.bucket(bucket_name)
        parts = [bucket.existing(one["name"]) for one in json.loads(self._body())["sourceObjects"]]
        _, temporary = self.storage.new_upload()
        with temporary.open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file, BLOCK)
        bucket.publish(temporary, name)
        self._json(bucket.described_with_hash(name, self.root_url))

    # --- uploads -------------------------------------------------------------------------------------------

    def _check_generation(self, bucket: Bucket, name: str) -> None:
        """ifGenerationMatch: 0 means that the object must not exist yet."""
        wanted = self.query.get("ifGenerationMatch")
        if wanted is None:
            return
        path = bucket.path(name)
        current = str(path.stat().st_mtime_ns // 1000) if path.is_file() else "0"
        if wanted != current:
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")

    def _upload(self, bucket_name: str) -> None:
        bucket = self.storage.bucket(bucket_name)
        if self.query.get("upload_id"):
            self._continue(bucket)
            return
        kind = self.query.get("uploadType", "media")
        name = self.query.get("name", "")
        if kind == "resumable":
            body = self._body()
            name = name or json.loads(body or b"{}").get("name", "")
            self._check_generation(bucket, name)
            upload, temporary = self.storage.new_upload()
            temporary.touch()
            self.storage.sessions[upload] = (bucket_name, name)
            where = f"{self.root_url}/upload/storage/v1/b/{bucket_name}/o?uploadType=resumable&upload_id={upload}"
            self._send(200, headers={"Location": where, "X-GUploader-UploadID": upload})
            return
        _, temporary = self.storage.new_upload()
        if kind == "multipart":
            metadata, content = multipart(self.headers.get("Content-Type") or "", self._body())
            name = name or metadata.get("name", "")
            temporary.write_bytes(content)
        else:
            with temporary.open("wb") as file:
                self._read_into(file)
        try:
            self._check_generation(bucket, name)
        except Refused:
            temporary.unlink()
            raise
        bucket.publish(temporary, name)
        self._json(bucket.described_with_hash(name, self.root_url))

    def _continue(self, bucket: Bucket) -> None:
        """A part of a resumable upload: `Content-Range: bytes 0-9/20`, `bytes 0-9/*`, `bytes */20` (a query)."""
        upload = self.query["upload_id"]
        temporary = self.storage.uploads / Path(upload).name
        if upload not in self.storage.sessions:
            raise Refused(404, f"no such upload: {upload}")
        if self.command == "DELETE":
            temporary.unlink(missing_ok=True)
            self._send(499)
            return
        asked = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range") or "")
        have = temporary.stat().st_size
        if not asked or asked[1] is not None:
            start = int(asked[1]) if asked and asked[1] else 0
            if start > have:
                raise Refused(503, f"bytes {have} to {start} are missing")
            with temporary.open("r+b") as file:
                file.seek(start)
                self._read_into(file)
                file.truncate()
            have = temporary.stat().st_size
        total = asked[3] if asked else str(have)
        if total == "*" or int(total) > have:
            self._send(308, headers={"Range": f"bytes=0-{have - 1}"} if have else {})
            return
        _, name = self.storage.sessions.pop(upload)
        bucket.publish(temporary, name)
        self._json(bucket.described_with_hash(name, self.root_url))

    def _batch(self) -> None:
        """Several requests in one; clients batch deletions."""
        boundary = _boundary(self.headers.get("Content-Type") or "")
        answers = []
        for number, part in enumerate(_parts(self._body(), boundary)):
            request = re.search(rb"^(DELETE|GET|PATCH|POST) (\S+)", part, re.MULTILINE)
            status = self._batched(request[1].decode(), request[2].decode()) if request else 400
            identity = re.search(rb"^Content-ID: *<?([^>\r\n]*)>?", part, re.MULTILINE | re.IGNORECASE)
            name = identity[1].decode() if identity else str(number)
            answers.append(
                f"--answer\r\nContent-Type: application/http\r\nContent-ID: <response-{name}>\r\n\r\n"
                f"HTTP/1.1 {status} {'OK' if status < 300 else 'Error'}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        self._send(200, ("".join(answers) + "--answer--\r\n").encode(), "multipart/mixed; boundary=answer")

    def _batched(self, method: str, url: str) -> int:
        match = re.search(r"/b/([^/]+)/o/([^/?]+)", url)
        if method != "DELETE" or not match:
            return 501
        try:
            self.storage.bucket(unquote(match[1])).delete(unquote(match[2]))
        except Refused as error:
            return error.status
        return 204

    # --- bytes ---------------------------------------------------------------------------------------------

    def _body(self) -> bytes:
        found = self.rfile.read(self.body_left) if self.body_left else self._chunked()
        self.body_left = 0
        return found

    def _chunked(self) -> bytes:
        """A body sent with Transfer-Encoding: chunked."""
        found = b""
        if self.is_chunked:
            self.is_chunked = False
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return found

    def _read_into(self, file: BinaryIO) -> None:
        if self.body_left:
            _copy_bytes(self.rfile, file, self.body_left)
            self.body_left = 0
        else:
            file.write(self._chunked())

    def _drain(self) -> None:
        self._chunked()
        while self.body_left > 0:
            self.body_left -= len(self.rfile.read(min(BLOCK, self.body_left))) or self.body_left

    def _json(self, data: object, status: int = 200) -> None:
        self._send(status, json.dumps(data).encode(), "application/json; charset=UTF-8")

    def _send(
        self, status: int, body: bytes = b"", content_type: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self._drain()
        self.send_response(status)
        if content_type:
            self.send_header("Content-Type", content_type)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _bucket_resource(name: str) -> dict[str, object]:
    return {"kind": "storage#bucket", "id": name, "name": name, "location": "US", "locationType": "multi-region",
            "storageClass": "STANDARD", "projectNumber": "123456789012", "metageneration": "1"}  # fmt: skip


def _copy_bytes(source: BinaryIO | BufferedIOBase, target: BinaryIO | BufferedIOBase, count: int) -> None:
    while count > 0:
        block = source.read(min(BLOCK, count))
        if not block:
            raise ConnectionResetError("the client stopped sending")
        target.write(block)
        count -= len(block)


def _boundary(content_type: str) -> bytes:
    """The boundary of a multipart body; gcloud puts it between single quotes."""
    match = re.search(r"boundary=(?:\"([^\"]+)\"|'([^']+)'|([^;]+))", content_type)
    if not match:
        raise Refused(400, "no boundary in Content-Type")
    return (match[1] or match[2] or match[3]).strip().encode()


def _parts(body: bytes, boundary: bytes) -> list[bytes]:
    """The parts of a multipart body, headers included; some clients end lines with LF alone."""
    parts = body.split(b"--" + boundary)[1:]
    return [re.sub(rb"\r?\n\Z", b"", part.split(b"\n", 1)[1]) for part in parts if not part.startswith(b"--")]


def multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Metadata and content of a multipart upload."""
    parts = _parts(body, _boundary(content_type))
    if len(parts) != 2:
        raise Refused(400, f"a multipart upload has two parts, this one {len(parts)}")
    contents = [re.split(rb"\r?\n\r?\n", part, maxsplit=1)[-1] for part in parts]
    return json.loads(contents[0] or b"{}"), contents[1]


def hand_over(folder: Path, owner: str, since: float) -> None:
    """Give what containers made below ``folder`` to ``owner`` ("uid:gid"), writable for the next ones.

    Trainers and this server are other users than the folder's owner, and than one another. What has not changed
    ``since`` (seconds since 1970) was there before, and is left as it is.
    """
    user, group = (int(word) for word in owner.split(":"))
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(where, name)
            about = os.lstat(path)
            if about.st_ctime < since or stat.S_ISLNK(about.st_mode):
                continue
            os.chown(path, user, group)
            os.chmod(path, stat.S_IMODE(about.st_mode) | (0o777 if name in folders else 0o666))


def main() -> None:
    """Serve until killed. The first line on stdout is {"url": ...}."""
    parser = argparse.ArgumentParser(description="A fake Cloud Storage over a folder that holds a folder a bucket.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000, help="0 takes a free one")
    parser.add_argument("--certificate", default="", help="PEM file with a key and a certificate, for HTTPS")
    parser.add_argument("--tls-port", type=int, default=443)
    parser.add_argument("--refuse", type=int, default=0, metavar="STATUS", help="answer every request with this status")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="wait before each answer")
    parser.add_argument("--hand-over", metavar="UID:GID", help="give what containers made to this user, and end")
    parser.add_argument("--since", type=float, default=0.0, help="with --hand-over: seconds since 1970")
    arguments = parser.parse_args()
    if arguments.hand_over:
        hand_over(arguments.folder, arguments.hand_over, arguments.since)
        return
    # As PID 1 of a container it would not get SIGTERM at all without a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    storage = Storage(**{name: value for name, value in vars(arguments).items() if name not in ("hand_over", "since")})
    print(json.dumps({"url": storage.url}), flush=True)
    try:
        storage.serve()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
