"""The fake Cloud Storage keeps objects as plain files, and is as strict as the real one where clients rely on it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from trainyard.sandbox.fakes.storage import Storage, hand_over


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    (tmp_path / "data").mkdir()
    with Storage(tmp_path) as found:
        yield found


@pytest.fixture
def ask(storage: Storage) -> Any:
    session = requests.Session()

    def send(method: str, path: str, **options: Any) -> requests.Response:
        return session.request(method, storage.url + path, timeout=5, **options)

    return send


def put(ask: Any, name: str, content: bytes = b"x") -> None:
    answer = ask("POST", f"/upload/storage/v1/b/data/o?uploadType=media&name={name}", data=content)
    assert answer.status_code == 200, answer.text


def test_an_uploaded_object_is_a_file_and_a_file_is_an_object(ask: Any, tmp_path: Path) -> None:
    put(ask, "a/b.txt", b"hello")
    assert (tmp_path / "data" / "a" / "b.txt").read_bytes() == b"hello"
    (tmp_path / "data" / "c d.txt").write_bytes(b"by hand")
    assert ask("GET", "/storage/v1/b/data/o/c%20d.txt?alt=media").content == b"by hand"
    assert ask("GET", "/data/c%20d.txt").content == b"by hand"  # the XML API, which TensorFlow reads with
    assert ask("GET", "/storage/v1/b/data/o/a%2Fb.txt").json()["size"] == "5"


@pytest.mark.parametrize(
    ("asked", "status", "content", "content_range"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
    ],
)
def test_ranges(ask: Any, asked: str, status: int, content: bytes, content_range: str) -> None:
    put(ask, "ten", b"0123456789")
    answer = ask("GET", "/storage/v1/b/data/o/ten?alt=media", headers={"Range": asked})
    assert (answer.status_code, answer.content, answer.headers["Content-Range"]) == (status, content, content_range)


def test_lists_have_prefixes_delimiters_and_pages(ask: Any) -> None:
    for name in ("a/1", "a/2", "a/deep/3", "b", "ab"):
        put(ask, name)

    def listed(**query: str) -> tuple[list[str], list[str], str]:
        data = ask("GET", "/storage/v1/b/data/o", params=query).json()
        return [one["name"] for one in data.get("items", [])], data.get("prefixes", []), data.get("nextPageToken", "")

    assert listed() == (["a/1", "a/2", "a/deep/3", "ab", "b"], [], "")
    assert listed(delimiter="/") == (["ab", "b"], ["a/"], "")
    assert listed(prefix="a/", delimiter="/") == (["a/1", "a/2"], ["a/deep/"], "")
    assert listed(prefix="a") == (["a/1", "a/2", "a/deep/3", "ab"], [], "")
    first = listed(maxResults="2")
    assert first[0] == ["a/1", "a/2"] and first[2]
    assert listed(maxResults="2", pageToken=first[2])[0] == ["a/deep/3", "ab"]
    assert listed(prefix="zzz") == ([], [], "")


def test_resumable_uploads_go_on_where_they_stopped(ask: Any, storage: Storage, tmp_path: Path) -> None:
    start = ask("POST", "/upload/storage/v1/b/data/o?uploadType=resumable&name=big", json={})
    where = start.headers["Location"].removeprefix(storage.url)
    assert ask("PUT", where, data=b"01234", headers={"Content-Range": "bytes 0-4/*"}).status_code == 308
    asked = ask("PUT", where, headers={"Content-Range": "bytes */10"})
    assert (asked.status_code, asked.headers["Range"]) == (308, "bytes=0-4")
    assert not (tmp_path / "data" / "big").exists()  # an object appears when it is complete
    done = ask("PUT", where, data=b"56789", headers={"Content-Range": "bytes 5-9/10"})
    assert done.json()["size"] == "10" and (tmp_path / "data" / "big").read_bytes() == b"0123456789"


def test_chunked_bodies_are_read_even_with_a_content_length(ask: Any, tmp_path: Path) -> None:
    """TensorFlow's client sends both headers."""
    start = ask("POST", "/upload/storage/v1/b/data/o?uploadType=resumable&name=c", json={})
    where = "/" + start.headers["Location"].split("/", 3)[3]
    assert ask("PUT", where, data=iter([b"hel", b"lo"]), headers={"Content-Range": "bytes 0-4/5"}).status_code == 200
    assert (tmp_path / "data" / "c").read_bytes() == b"hello"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_multipart_uploads_of_either_line_end(ask: Any, tmp_path: Path, end: str) -> None:
    head = f"--==0=={end}Content-Type: application/json{end}{end}" + json.dumps({"name": "m"})
    body = (
        (head + f"{end}--==0=={end}Content-Type: text/plain{end}{end}").encode()
        + b"a\r\n\r\nb\n"
        + f"{end}--==0==--".encode()
    )
    answer = ask(
        "POST",
        "/upload/storage/v1/b/data/o?uploadType=multipart",
        data=body,
        headers={"Content-Type": 'multipart/related; boundary="==0=="'},
    )
    assert answer.status_code == 200 and (tmp_path / "data" / "m").read_bytes() == b"a\r\n\r\nb\n"


def test_copying_composing_and_deleting(ask: Any, tmp_path: Path) -> None:
    put(ask, "one", b"1")
    put(ask, "two", b"2")
    assert ask("POST", "/storage/v1/b/data/o/one/rewriteTo/b/data/o/deep%2Fcopy").json()["done"] is True
    assert ask("POST", "/storage/v1/b/data/o/deep%2Fcopy/moveTo/o/deep%2Fmoved").json()["name"] == "deep/moved"
    assert [path.name for path in (tmp_path / "data" / "deep").iterdir()] == ["moved"]
    assert ask(
        "POST", "/storage/v1/b/data/o/both/compose", json={"sourceObjects": [{"name": "one"}, {"name": "two"}]}
    ).ok
    assert (tmp_path / "data" / "both").read_bytes() == b"12"
    assert ask("DELETE", "/storage/v1/b/data/o/deep%2Fmoved").status_code == 204
    assert not (tmp_path / "data" / "deep").exists()  # folders are only names in Cloud Storage
    batch = (
        "--b\r\nContent-Type: application/http\r\nContent-ID: <x+1>\r\n\r\n"
        "DELETE /storage/v1/b/data/o/one HTTP/1.1\r\n\r\n\r\n--b\r\nContent-Type: application/http\r\n\r\n"
        "DELETE /storage/v1/b/data/o/gone HTTP/1.1\r\n\r\n\r\n--b--"
    )
    answer = ask("POST", "/batch/storage/v1", data=batch, headers={"Content-Type": "multipart/mixed; boundary=b"})
    assert "HTTP/1.1 204" in answer.text and "HTTP/1.1 404" in answer.text and "<response-x+1>" in answer.text
    assert not (tmp_path / "data" / "one").exists()


def test_preconditions(ask: Any) -> None:
    put(ask, "once")
    again = "/upload/storage/v1/b/data/o?uploadType=media&name=once&ifGenerationMatch="
    assert ask("POST", again + "0", data=b"y").status_code == 412
    generation = ask("GET", "/storage/v1/b/data/o/once").json()["generation"]
    assert ask("POST", again + generation, data=b"y").status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/storage/v1/b/data/o/nothing", 404),
        ("/storage/v1/b/other/o/x", 404),
        ("/storage/v1/b/.uploads/o/x", 404),
        ("/storage/v1/b/data/o/..%2F..%2Fetc%2Fpasswd?alt=media", 400),
        ("/data/..%2f..%2fsecret", 400),
        ("/nonsense", 404),
    ],
)
def test_what_is_not_there_or_outside_is_refused(ask: Any, path: str, status: int) -> None:
    answer = ask("GET", path)
    assert answer.status_code == status and answer.json()["error"]["code"] == status


def test_a_server_that_refuses_refuses_everything_and_keeps_nothing(ask: Any, storage: Storage, tmp_path: Path) -> None:
    put(ask, "before")
    storage.refuse = 403
    for method, path in (
        ("GET", "/storage/v1/b/data"),
        ("GET", "/storage/v1/b/data/o"),
        ("GET", "/data/before"),
        ("POST", "/upload/storage/v1/b/data/o?uploadType=media&name=after"),
        ("DELETE", "/storage/v1/b/data/o/before"),
    ):
        answer = ask(method, path, data=b"x")
        assert answer.status_code == answer.json()["error"]["code"] == 403, (method, path)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["before"]


def test_a_name_that_no_file_can_have_is_refused_and_nothing_is_lost(ask: Any, tmp_path: Path) -> None:
    put(ask, "a", b"kept")
    answer = ask("POST", "/upload/storage/v1/b/data/o?uploadType=media&name=a/b", data=b"x")
    assert answer.status_code == 409 and (tmp_path / "data" / "a").read_bytes() == b"kept"


def test_what_cannot_be_read_is_an_error_and_not_the_end(ask: Any) -> None:
    answer = ask("POST", "/upload/storage/v1/b/data/o?uploadType=resumable", data=b"{no json")
    assert answer.status_code == 500 and "JSONDecodeError" in answer.json()["error"]["message"]
    put(ask, "still-there")


def test_folder_markers_are_folders(ask: Any, tmp_path: Path) -> None:
    put(ask, "empty/", b"")
    assert (tmp_path / "data" / "empty").is_dir()
    assert [one["name"] for one in ask("GET", "/storage/v1/b/data/o").json()["items"]] == ["empty/"]
    assert ask("GET", "/storage/v1/b/data/o/empty%2F").json()["size"] == "0"


def test_buckets_are_folders(ask: Any, tmp_path: Path) -> None:
    assert ask("POST", "/storage/v1/b", json={"name": "new-one"}).json()["name"] == "new-one"
    assert (tmp_path / "new-one").is_dir()
    assert [one["name"] for one in ask("GET", "/storage/v1/b").json()["items"]] == ["data", "new-one"]
    assert ask("DELETE", "/storage/v1/b/new-one").status_code == 204


def test_what_containers_made_is_handed_over_and_the_rest_left_alone(tmp_path: Path) -> None:
    old, new, folder = tmp_path / "old", tmp_path / "new", tmp_path / "folder"
    old.touch(0o600)
    time.sleep(0.02)
    since = time.time() - 0.01
    new.touch(0o600)
    folder.mkdir(0o755)
    hand_over(tmp_path, f"{os.getuid()}:{os.getgid()}", since)
    assert [path.stat().st_mode & 0o777 for path in (old, new, folder)] == [0o600, 0o666, 0o777]
