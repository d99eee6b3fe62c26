"""A stand-in for Google Cloud Storage's JSON API: one bucket in memory, for gcsfs through STORAGE_EMULATOR_HOST.

Standard library only: it runs inside the images. ``python fake_storage.py PORT [FOLDER]`` serves until it is killed,
with the files of FOLDER in the bucket "bucket". What was asked for is listed at /asked; /refuse?status=403 refuses
from then on.
"""

from __future__ import annotations

import base64
import email
import hashlib
import http.server
import json
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"


class Storage(http.server.ThreadingHTTPServer):
    """The server and what it stores; listens on loopback only."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        self.asked: list[str] = []
        self.refuse = 0
        self.lock = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    """Objects: get, list, download (whole or a range), upload (multipart and resumable), delete."""

    protocol_version = "HTTP/1.1"
    server: Storage

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing; requests are kept in ``asked``."""

    def do_GET(self) -> None:
        path, query = self._asked("GET")
        if path == "/asked":
            self._json({"asked": self.server.asked})
        elif path == "/refuse":
            self.server.refuse = int(query["status"])
            self._json({})
        elif self.server.refuse:
            self._json({"error": {"code": self.server.refuse, "message": "not yours"}}, self.server.refuse)
        elif path == f"/storage/v1/b/{BUCKET}":
            self._json({"kind": "storage#bucket", "name": BUCKET, "location": "US", "storageClass": "STANDARD"})
        elif path == f"/storage/v1/b/{BUCKET}/o":
            self._json(self._listing(query))
        elif (name := self._object(path)) in self.server.objects:
            media = query.get("alt") == "media" or path.startswith("/download/")
            self._media(self.server.objects[name]) if media else self._json(self._meta(name))
        else:
            self._json({"error": {"code": 404, "message": "Not Found"}}, 404)

    def do_POST(self) -> None:
        _, query = self._asked("POST")
        if "upload_id" in query:  # gcsfs sends the parts of an upload with POST, other clients with PUT
            return self._part(query["upload_id"])
        body = self._body()
        if self.server.refuse:
            self._json({"error": {"code": self.server.refuse, "message": "not yours"}}, self.server.refuse)
        elif query.get("uploadType") == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            with self.server.lock:
                number = str(len(self.server.uploads))
                self.server.uploads[number] = (name, bytearray())
            where = f"http://127.0.0.1:{self.server.server_port}/upload/storage/v1/b/{BUCKET}/o?upload_id={number}"
            self._json({}, headers={"Location": where})
        else:
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            meta, content = email.message_from_bytes(head + body).get_payload()  # type: ignore[misc]
            name = json.loads(meta.get_payload())["name"]
            self.server.objects[name] = content.get_payload(decode=True)
            self._json(self._meta(name))

    def do_PUT(self) -> None:
        self._part(self._asked("PUT")[1]["upload_id"])

    def _part(self, upload: str) -> None:
        name, content = self.server.uploads[upload]
        content += self._body()
        if self.headers["Content-Range"].endswith("/*"):
            self._json({}, 308, {"Range": f"bytes=0-{len(content) - 1}"})
        else:
            self.server.objects[name] = bytes(content)
            self._json(self._meta(name))

    def do_DELETE(self) -> None:
        path, _ = self._asked("DELETE")
        found = self.server.objects.pop(self._object(path), None)
        self._json({}, 404 if found is None else 204)

    def _asked(self, verb: str) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        self.server.asked.append(f"{verb} {self.path}")
        return parts.path, {key: values[-1] for key, values in parse_qs(parts.query).items()}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    @staticmethod
    def _object(path: str) -> str:
        return unquote(path.partition(f"/b/{BUCKET}/o/")[2])

    def _meta(self, name: str) -> dict[str, Any]:
        content = self.server.objects[name]
        return {"kind": "storage#object", "bucket": BUCKET, "name": name, "size": str(len(content)), "generation": "1",
                "timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z",
                "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode()}  # fmt: skip

    def _listing(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, folders = [], set()
        for name in sorted(self.server.objects):
            if name.startswith(prefix):
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    items.append(self._meta(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}

    def _media(self, content: bytes) -> None:
        span, status = self.headers.get("Range", ""), 200
        headers = {}
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        self._send(status, "application/octet-stream", content, headers)

    def _json(self, content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", b"" if status == 204 else json.dumps(content).encode(), headers or {})

    def _send(self, status: int, kind: str, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    storage = Storage(int(sys.argv[1]))
    if len(sys.argv) > 2:
        root = Path(sys.argv[2])
        storage.objects = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    storage.serve_forever()
