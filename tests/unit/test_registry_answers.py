"""What a registry answers, or a proxy before it, is compared, limited and checked before anything uses it."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import re
import shutil
import socket
import ssl
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from tests import examples
from tests.claims import CLAIMS
from tests.fakes.engine import FakeEngine
from tests.fakes.registry import Answer, Registry, sha256

from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import state_folder
from trainyard.image import recipes
from trainyard.oci import image_index, image_store, inventory, referrers, statements, transport
from trainyard.oci.documents import InvalidAnswer
from trainyard.oci.registry import Manifest, Repository
from trainyard.release import claims, predicates, promotion
from trainyard.release.keys import KeySigner
from trainyard.spec import model, naming, state
from trainyard_jobs.rehearsal import certificates

OCI = "application/vnd.oci.image"
IMAGE = f"{OCI}.manifest.v1+json"
Command = Callable[..., tuple[int, str, str]]
VERSION = model.load("tf-cpu").version
NAMED = recipes.named(model.load("tf-cpu"))
SBOM = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "components": [{"name": "torch", "version": "2.9.1", "purl": "pkg:pypi/torch@2.9.1"}],
}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    monkeypatch.setattr(promotion, "_WAIT", 0)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as fake:
        yield fake


@pytest.fixture
def place(registry: Registry) -> Repository:
    return Repository(f"{registry.host}/ml/trainyard")


def put(registry: Registry, name: str, architecture: str = "amd64") -> Manifest:
    """An image of tf-cpu that passed on this host, under a separate tag; its layer is an empty tar."""
    layer = gzip.compress(bytes(1024), mtime=0)
    labels = {
        "io.trainyard.target": "tf-cpu",
        "io.trainyard.framework": f"tensorflow=={VERSION}",
        naming.TAG: f"tf-cpu-{VERSION}-20261121-{sha256(name.encode())[7:15]}-{architecture}",
    }
    about = {"os": "linux", "architecture": architecture, "config": {"Labels": labels}}
    config = json.dumps(about | {"rootfs": {"type": "layers", "diff_ids": [sha256(bytes(1024))]}}).encode()
    registry.blobs |= {sha256(config): config, sha256(layer): layer}
    image = Manifest.of(
        {
            "schemaVersion": 2,
            "config": {"mediaType": f"{OCI}.config.v1+json", "digest": sha256(config), "size": len(config)},
            "layers": [{"mediaType": f"{OCI}.layer.v1.tar+gzip", "digest": sha256(layer), "size": len(layer)}],
        },
        f"{OCI}.manifest.v1+json",
    )
    registry.put_manifest(name, image.media_type, image.body)
    local = "tf-cpu" if architecture == "amd64" else f"tf-cpu-{architecture}"
    for step in ("verify", "smoke"):
        state.record(state_folder() / local, step, image.digest, {"passed": True})  # type: ignore[arg-type]
    return image


# --- every odd answer is one line ------------------------------------------------------------------------------------


def member(value: str) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        answer.body = b'{"odd": ' + value.encode() + b", " + answer.body.lstrip()[1:]

    return change


def body(text: bytes, media_type: str = "") -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        answer.body = text
        if media_type:
            answer.headers["Content-Type"] = media_type

    return change


def refused(answer: Answer) -> None:
    answer.status, answer.body = 403, b'{"errors": 5, "token": "\x1b[31m"}'


def elsewhere(answer: Answer) -> None:
    answer.status, answer.headers["Location"] = 307, "http://203.0.113.1/stolen"


NAMES = ["config", "layers", "manifests", "tags", "rootfs", "os", "architecture", "annotations", "components"]
ODD: dict[str, Callable[[Answer], None]] = {
    "the page of a proxy": body(b"<!DOCTYPE html><title>Log in</title>", "text/html"),
    "nothing": body(b""),
    "a list": body(b"[]"),
    "null": body(b"null"),
    "a text": body(b'"text"'),
    "bytes": body(b"\xff\xfe\x00"),
    "not a number": member("NaN"),
    "infinity": member("1e999"),
    "5,000 digits": member("9" * 5000),
    "half a surrogate": member('"\\ud800"'),
    "deep nesting": member("[" * 5000 + "]" * 5000),
    "members of other types": body(json.dumps(dict.fromkeys(NAMES, 7)).encode()),
    "lists of other types": body(json.dumps({name: [7, None] for name in NAMES}).encode()),
    "no members": body(b"{}"),
    "a refusal": refused,
    "a redirect to another host": elsewhere,
}

#: What is answered oddly: method, and what its path has.
KINDS: dict[str, Callable[[str], bool]] = {
    "tags": lambda path: "/manifests/" in path and "sha256:" not in path,
    "digests": lambda path: "/manifests/sha256:" in path,
    "blobs": lambda path: "/blobs/" in path,
    "lists": lambda path: "/tags/list" in path or "/referrers/" in path,
}


COMMANDS = ["promote", "promote signed", "rollback", "find", "sign", "check", "image-index", "diff", "check-job"]


@pytest.fixture
def commands(registry: Registry, place: Repository, tmp_path: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Commands that read a registry, all of which succeed with what it has."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public, job = tmp_path / "key.pem", tmp_path / "key.pub", tmp_path / "job.yaml"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    address = place.name.rpartition("/")[0]
    older, image, arm = put(registry, "older"), put(registry, "image"), put(registry, "arm", "arm64")
    signer = KeySigner(key)
    for one in (older, image):
        promotion.promote(NAMED, place, one.digest)
    sbom = predicates.sbom(json.dumps(SBOM))
    claims.attach(place, image, None, [sbom])
    claims.attach(place, image, signer, [sbom, *(one for one in CLAIMS if one.kind != "sbom")])
    job.write_text(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: train}\nspec:\n  template:\n    spec:\n"
        f"      restartPolicy: Never\n      containers: [{{name: train, image: {place.name}@{image.digest}}}]\n"
    )
    at = ["--registry", address]
    return {
        "promote": (["promote", "tf-cpu", *at, "--image", older.digest], {}),
        "promote signed": (
            ["promote", "tf-cpu", *at, "--image", image.digest, "--require-signed", "--public-key", str(public)],
            {},
        ),
        "rollback": (["rollback", "tf-cpu", *at], {}),
        "find": (["find", "torch", *at], {}),
        "sign": (["sign", "--image", f"{place.name}:image", "--key", str(private)], {}),
        "check": (["sign", "--image", f"{place.name}@{image.digest}", "--public-key", str(public)], {}),
        "image-index": (["image-index", "tf-cpu", "--images", f"image {arm.digest}", *at], {}),
        "diff": (["diff", f"{place.name}@{older.digest}", f"{place.name}@{image.digest}"], {}),
        "check-job": (["check-job", str(job)], {"REQUIRE_SIGNED": "1", "COSIGN_PUB": str(public)}),
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_an_odd_answer_is_one_line(
    name: str,
    registry: Registry,
    commands: dict[str, tuple[list[str], dict[str, str]]],
    trainyard: Command,
) -> None:
    """16 answers in place of each of 4 kinds of documents; a third of them without --big, others for each command."""
    arguments, variables = commands[name]
    kept = dict(registry.manifests), dict(registry.tags), dict(registry.blobs)
    asked = set()

    def run() -> tuple[int, str, str]:
        registry.manifests, registry.tags, registry.blobs = map(dict, kept)  # type: ignore[arg-type]
        return trainyard(*arguments, **variables)

    assert run()[0] == 0
    for number, (kind, chosen) in enumerate(KINDS.items(), COMMANDS.index(name)):
        for what, change in list(ODD.items()) if examples.ALL else list(ODD.items())[number % 3 :: 3]:

            def answer(method: str, path: str, given: Answer) -> Answer:
                if method == "GET" and given.status == 200 and chosen(path):  # noqa: B023
                    asked.add(kind)  # noqa: B023
                    change(given)  # noqa: B023
                return given

            registry.after = answer
            status, out, err = run()
            assert "Traceback" not in err + out, (kind, what, err)
            assert "\x1b" not in err and "203.0.113.1/" not in err
            lines = [line for line in err.splitlines() if not line.startswith(("NOTE", "REFUSE", "  ", "WARNING"))]
            assert not status or (status in (1, 2) and len(lines) == 1), (kind, what, err)
    assert len(asked) >= 2


@pytest.mark.parametrize("name", ["find", "check", "promote signed"])
@pytest.mark.parametrize("kind", [statements.PLAIN, statements.BUNDLE])
def test_an_odd_document_that_is_attached_is_one_line(
    kind: str,
    name: str,
    registry: Registry,
    place: Repository,
    commands: dict[str, tuple[list[str], dict[str, str]]],
    trainyard: Command,
) -> None:
    """Whoever may write to the repository may attach anything; its digest is right."""
    image = put(registry, "another")
    arguments, variables = commands[name]
    arguments = [one.replace(registry.tags["image"], image.digest) for one in arguments]
    for change in list(ODD.values())[:: 1 if examples.ALL else 2]:
        odd = Answer(200, json.dumps(SBOM).encode(), {})
        change(odd)
        referrers.attach(place, image, [statements.artifact(odd.body, kind, predicates.TYPES["sbom"])])
        status, out, err = trainyard(*arguments, **variables)
        assert "Traceback" not in err and "\x1b" not in err + out
        if name == "find":
            assert status == 0 and ("is not a JSON document" in err or "is malformed" in err)
        else:
            lines = [line for line in err.splitlines() if not line.startswith("  ")]
            assert status == 1 and len(lines) == 1, err


# --- a lie about one digest is noticed -------------------------------------------------------------------------------


def lying_about(digest: str, instead: bytes) -> Callable[[str, str, Answer], Answer]:
    def answer(method: str, path: str, given: Answer) -> Answer:
        if method == "GET" and given.status == 200 and path.endswith(digest):
            given.body = instead
        return given

    return answer


@pytest.mark.parametrize("name", COMMANDS)
def test_a_lie_about_any_digest_is_noticed_by_the_command_that_reads_it(
    name: str,
    registry: Registry,
    commands: dict[str, tuple[list[str], dict[str, str]]],
    trainyard: Command,
) -> None:
    """The registry has another document of the same kind, and answers with it in place of each that is read."""
    arguments, variables = commands[name]
    kept = dict(registry.manifests), dict(registry.tags), dict(registry.blobs)
    registry.requests.clear()
    assert trainyard(*arguments, **variables)[0] == 0
    documents = [one for one in registry.requests if re.match(r"GET .*/(manifests|blobs)/sha256:", one)]
    read = {one.rpartition("/")[2] for one in documents}
    read -= {one for one in read if one not in kept[0] and one not in kept[2]}  # what the command itself wrote
    assert read
    for digest in read:
        registry.manifests, registry.tags, registry.blobs = map(dict, kept)  # type: ignore[arg-type]
        before = dict(registry.tags)
        original = kept[0][digest][1] if digest in kept[0] else kept[2][digest]
        registry.after = lying_about(digest, original + b" ")
        status, out, err = trainyard(*arguments, **variables)
        assert status in (1, 2) or ("not covered: " in err or "NOTE " in err), (digest, err)
        assert "nothing of it is used" in err + out
        assert "Traceback" not in err and registry.tags == before


def test_a_tag_is_compared_with_the_digest_that_the_registry_names(registry: Registry, place: Repository) -> None:
    """A proxy that changes a manifest on its way, or keeps an old one, is noticed."""
    put(registry, "image")

    def answer(method: str, path: str, given: Answer) -> Answer:
        given.body += b" "
        return given

    registry.after = answer
    with pytest.raises(InvalidAnswer, match="answered with other content"):
        place.manifest("image")


def test_a_layer_is_compared_where_it_ends_packed_and_unpacked(registry: Registry, place: Repository) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as made:
        made.addfile(tarfile.TarInfo("file"))
    blob = gzip.compress(tar.getvalue(), mtime=0)
    registry.blobs[sha256(blob)] = blob

    def read(digest: str, diff_id: str, size: int) -> None:
        with place.stream(digest, size) as stream:
            inventory.read_layer(stream, image_store.Expected(diff_id, size))

    good = sha256(blob), sha256(tar.getvalue()), len(blob)
    read(*good)
    with pytest.raises(InvalidAnswer, match=r"the layer sha256:00.* is another one"):
        read(good[0], f"sha256:{'00' * 32}", good[2])
    with pytest.raises(InvalidAnswer, match=r"the blob .* is another one"):
        read(good[0], good[1], 5)
    registry.after = lying_about(good[0], gzip.compress(tar.getvalue(), 1, mtime=1))
    with pytest.raises(InvalidAnswer, match=r"the blob .* is another one"):
        read(*good)


def test_layers_that_grow_without_measure_are_refused(
    registry: Registry, place: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_store, "ALWAYS_UNPACKED", 1 << 20)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as made:
        member = tarfile.TarInfo("zeros")
        member.size = 4 << 20
        made.addfile(member, io.BytesIO(bytes(member.size)))
    blob = gzip.compress(tar.getvalue())
    registry.blobs[sha256(blob)] = blob
    with (
        pytest.raises(InvalidAnswer, match=r"grows from 4,... bytes to more than 1,048,576"),
        place.stream(sha256(blob), len(blob)) as stream,
    ):
        inventory.read_layer(stream, image_store.Expected(sha256(tar.getvalue()), len(blob)))


def test_a_package_whose_metadata_is_a_hard_link_is_listed() -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo("opt/site/other")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
        link = tarfile.TarInfo("opt/site/Some_Package-1.2.dist-info/METADATA")
        link.type, link.linkname = tarfile.LNKTYPE, "opt/site/other"
        tar.addfile(link)
    made.seek(0)
    found = inventory.read_layer(io.BufferedReader(made))  # type: ignore[arg-type]
    assert [(name, one.version) for name, one in found.python.items()] == [("some-package", "1.2")]
    assert found.size == 3


@pytest.mark.parametrize("removed", ["opt/site/.wh.a-1.0.dist-info", "opt/.wh.site", "opt/site/.wh..wh..opq"])
def test_a_package_that_an_upper_layer_removes_is_not_listed(removed: str) -> None:
    def layer(*files: tuple[str, str]) -> inventory.LayerPackages:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            for path, name in files:
                text = f"Name: {name}\nVersion: 1.0\n".encode()
                member = tarfile.TarInfo(path)
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
        made.seek(0)
        return inventory.read_layer(io.BufferedReader(made))  # type: ignore[arg-type]

    lower = layer(("opt/site/a-1.0.dist-info/METADATA", "a"), ("opt/lib/b-1.0.dist-info/METADATA", "b"))
    upper = layer((removed, ""), ("opt/other/c-1.0.dist-info/METADATA", "c"))
    summaries = tuple(inventory.LayerSummary(name, "", name, 0, 0) for name in ("lower", "upper"))
    image = inventory.Image("x", "", {}, {}, summaries, {"lower": lower, "upper": upper})
    assert list(image.python()) == ["b", "c"]


def test_a_header_of_a_layer_may_not_be_as_long_as_it_likes() -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 200 << 20
    stream = io.BufferedReader(io.BytesIO(header.tobuf()))  # type: ignore[arg-type]
    with pytest.raises(StepFailed, match="a header of 209,715,200 bytes"):
        list(image_store.members(stream))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE])
def test_a_header_of_digits_takes_no_time(kind: bytes) -> None:
    """In quadratic time, as Python reads it before 3.11.10 and 3.12.6, it takes hours."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = kind, 4 << 20
    stream = io.BufferedReader(io.BytesIO(header.tobuf() + b"1" * header.size))  # type: ignore[arg-type]
    with pytest.raises(StepFailed, match="a header with more digits than a name may have"):
        list(image_store.members(stream))


def test_contents_and_names_of_digits_are_read() -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("1" * 200, "2" * 200):
            member = tarfile.TarInfo(name)
            member.size = 5000
            tar.addfile(member, io.BytesIO(b"7" * 5000))
    made.seek(0)
    read = [tar.extractfile(member).read() for tar, member in image_store.members(io.BufferedReader(made))]  # type: ignore
    assert read == [b"7" * 5000] * 2


def test_an_image_whose_layers_have_digits_is_saved(fake_engine: FakeEngine, tmp_path: Path) -> None:
    """Their headers are not read here: a layer is the content of a file in what the engine saves."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in (("oci-layout", b"{}"), ("blobs/sha256/1", b"7" * 5000)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    fake_engine.add("mine:1", digest="sha256:0123", saved=made.getvalue())
    image_store.save(Context().engine, "mine:1", tmp_path)
    assert (tmp_path / "blobs/sha256/1").read_bytes() == b"7" * 5000


# --- limits ----------------------------------------------------------------------------------------------------------


def test_manifests_and_documents_are_read_up_to_a_limit(registry: Registry, place: Repository) -> None:
    image = put(registry, "image")

    def answer(method: str, path: str, given: Answer) -> Answer:
        given.body += b" " * (33 << 20)
        return given

    registry.after = answer
    with pytest.raises(InvalidAnswer, match="has more than 4 MiB"):
        place.manifest("image")
    with pytest.raises(InvalidAnswer, match="has more than 32 MiB"):
        place.config(image)


def test_a_document_that_trickles_is_given_up(
    registry: Registry, place: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(registry, "image")
    monkeypatch.setattr(transport.read, "__defaults__", (0.1,))

    def answer(method: str, path: str, given: Answer) -> Answer:
        given.seconds = 0.02
        return given

    registry.after = answer
    with pytest.raises(InvalidAnswer, match="did not arrive within 0 s"):
        place.manifest("image")


@pytest.mark.parametrize("sent", ["", "HTTP/1.1 200 OK\r\nX-Dripping: "])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_headers_that_trickle_are_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sent: str, scheme: str
) -> None:
    """No single byte is waited for long: each is followed by the next one."""
    monkeypatch.setattr(transport, "DEADLINE", 0.5)
    authority, server_pem = tmp_path / "authority.pem", tmp_path / "server.pem"
    for file, pem in zip((authority, server_pem), certificates.make(["localhost"]), strict=True):
        file.write_bytes(pem)
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(sent.encode())
            while not over.wait(0.02):
                connection.sendall(b"H")

    with socket.create_server(("localhost", 0)) as listening:
        server = listening
        if scheme == "https":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(server_pem)
            server = context.wrap_socket(listening, server_side=True)
        thread = threading.Thread(target=lambda: drip(server.accept()[0]))
        thread.start()
        url = f"{scheme}://localhost:{server.getsockname()[1]}/v2/"
        began = time.monotonic()
        with pytest.raises(InvalidAnswer, match=r"^the answer of localhost did not begin within 0\.5 s$"):
            transport.Session().get(url, verify=str(authority), timeout=transport.TIMEOUT, stream=True)
        assert time.monotonic() - began < transport.TIMEOUT / 2
        over.set()
        thread.join()


def test_an_answer_that_leads_from_place_to_place_is_given_up(registry: Registry, place: Repository) -> None:
    put(registry, "image")

    def answer(method: str, path: str, given: Answer) -> Answer:
        given.status, given.headers["Location"] = 307, f"{path}?again"
        return given

    registry.after = answer
    with pytest.raises(StepFailed, match="Exceeded 5 redirects"):
        place.manifest("image")
    assert len(registry.requests) == 6


@pytest.mark.parametrize(
    ("member", "other"), [("layers", "Layers"), ("config", "CONFIG"), ("mediaType", "mediatype"), ("digest", "Digest")]
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_member_in_another_case_is_refused(
    registry: Registry, place: Repository, member: str, other: str, beside: bool
) -> None:
    """Docker, which is written in Go, reads it as the member."""
    text = put(registry, "image").body.replace(
        b'"schemaVersion":2', f'"schemaVersion":2,"mediaType":"{IMAGE}"'.encode()
    )
    key = f'"{member}":'.encode()
    found = re.search(re.escape(key) + rb'(\[.*?\]|\{.*?\}|".*?")', text)
    assert found
    changed = found[0].replace(key, f'"{other}":'.encode())
    odd = text.replace(found[0], found[0] + b"," + changed if beside else changed, 1)
    assert json.loads(odd) and odd != text
    registry.manifests["odd"] = (IMAGE, odd)
    with pytest.raises(InvalidAnswer, match=f"the member '{other}' is spelled '{member}'"):
        place.manifest("odd")


@pytest.mark.parametrize("name", ["../../../secret/x", "a/b", "x\x1b[2J", "", "-a", "a?n=1", "%2e%2e", "a" * 129])
def test_a_listed_tag_is_no_path(registry: Registry, place: Repository, name: str) -> None:
    def answer(method: str, path: str, given: Answer) -> Answer:
        given.body = json.dumps({"name": "x", "tags": ["good", name]}).encode()
        return given

    registry.after = answer
    with pytest.raises(InvalidAnswer, match=r"is malformed: tags\.1: String should match pattern"):
        place.tags()


@pytest.mark.parametrize(
    ("following", "says"),
    [
        ("</v2/ml/trainyard/tags/list?n=1000>", "has no end"),
        ("<http://203.0.113.1/v2/ml/trainyard/tags/list>", "goes on at '203.0.113.1', another host"),
    ],
)
def test_a_list_has_an_end_and_stays_at_the_registry(
    registry: Registry, place: Repository, following: str, says: str
) -> None:
    def answer(method: str, path: str, given: Answer) -> Answer:
        given.headers["Link"] = f'{following}; rel="next"'
        return given

    registry.after = answer
    with pytest.raises(InvalidAnswer, match=says):
        place.tags()


def test_a_registry_may_ask_to_wait_for_half_a_minute_at_most_and_it_is_said(
    registry: Registry, place: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(registry, "image")
    slept: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", slept.append)
    answers = iter([(429, "3600"), (503, "soon"), (503, "9" * 400), (200, "")])

    def answer(method: str, path: str, given: Answer) -> Answer:
        given.status, given.headers["Retry-After"] = next(answers)
        return given

    registry.after = answer
    assert place.manifest("image")
    assert {seconds for seconds in slept if seconds > 1} == {30}
    assert capsys.readouterr().err.splitlines()[0] == "the registry is busy (status 429): trying again in 30 s"


# --- passwords and tokens --------------------------------------------------------------------------------------------


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry with tokens; Docker's configuration has the credentials."""
    with Registry(user="me", password="the-password") as fake:
        write_docker_config(fake, tmp_path, monkeypatch)
        yield fake


def write_docker_config(fake: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fake.docker_config()), encoding="utf-8")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


def naming_realm(realm: str) -> Callable[[str, str, Answer], Answer]:
    def answer(method: str, path: str, given: Answer) -> Answer:
        if given.status == 401:
            given.headers["WWW-Authenticate"] = f'Bearer realm="{realm}",service="x"'
        return given

    return answer


def test_a_password_is_not_sent_to_a_realm_without_tls(private: Registry) -> None:
    private.after = naming_realm("http://203.0.113.1/token")
    with pytest.raises(InvalidAnswer, match="not an https address: none was sent"):
        Repository(f"{private.host}/ml/trainyard").manifest("image")


def test_a_realm_on_another_host_gets_the_password_only_when_this_run_was_sent_there(private: Registry) -> None:
    """Docker Hub and GitLab have such realms."""
    put(private, "image")
    with Registry(user="me", password="the-password") as realm:
        realm.tokens = private.tokens
        private.after = naming_realm(f"http://{realm.host}/token")
        for _ in range(2):
            private.requests.clear()
            realm.requests.clear()
            assert Repository(f"{private.host}/ml/trainyard").manifest("image")
            assert private.requests == ["GET /v2/ml/trainyard/manifests/image"] * 2
            assert realm.requests == ["GET /token"]
        private.user = ""  # the registry asks for no token now, so the password is sent nowhere
        assert Repository(f"{private.host}/ml/trainyard").manifest("image")
        assert len(realm.requests) == 1


@pytest.mark.parametrize("status", [307, 200])
def test_tokens_stay_with_the_registry(private: Registry, status: int) -> None:
    """Neither an upload's Location nor a redirect takes them to another host."""
    image = put(private, "image")
    with Registry() as other:
        other.blobs, other.uploads = private.blobs, {"x"}

        def answer(method: str, path: str, given: Answer) -> Answer:
            if method == "POST":
                given.headers["Location"] = f"http://{other.host}/v2/ml/trainyard/blobs/uploads/x"
            if method == "GET" and "/blobs/" in path and given.status == 200:
                given.status, given.headers["Location"] = status, f"http://{other.host}{path}"
            return given

        private.after = answer
        place = Repository(f"{private.host}/ml/trainyard")
        place.upload(b"data", sha256(b"data"))
        place.config(image)
        assert other.requests and not any(other.authorizations)


def test_an_upload_that_another_host_kept_for_itself_failed(registry: Registry, place: Repository) -> None:
    with Registry() as other:
        other.uploads = {"x"}

        def answer(method: str, path: str, given: Answer) -> Answer:
            if method == "POST":
                given.headers["Location"] = f"http://{other.host}/v2/ml/trainyard/blobs/uploads/x"
            return given

        registry.after = answer
        with pytest.raises(InvalidAnswer, match=f"to {other.host}, and does not have it"):
            place.upload(b"data", sha256(b"data"))


@pytest.mark.parametrize("where", ["http://[", "http://[::1", "//[x]:y", "", "http://host:99999999/"])
def test_an_address_that_is_none_is_one_line(private: Registry, where: str) -> None:
    """As the place to upload to, the next page, a redirect, and the token service."""
    image = put(private, "image")

    def answer(method: str, path: str, given: Answer) -> Answer:
        if method == "POST":
            given.headers["Location"] = where
        elif "/tags/list" in path and given.status == 200:
            given.headers["Link"] = f'<{where}>; rel="next"'
        elif "/blobs/" in path and given.status == 200:
            given.status, given.headers["Location"] = 307, where
        return given

    private.after = answer
    place = Repository(f"{private.host}/ml/trainyard")
    for read in (lambda: place.upload(b"data", sha256(b"data")), place.tags, lambda: place.config(image)):
        with contextlib.suppress(StepFailed):
            read()
    private.after = naming_realm(where)
    shutil.rmtree(state_folder() / "registries")  # where the token was from before
    with pytest.raises(StepFailed):
        Repository(f"{private.host}/ml/trainyard").manifest("image")


@pytest.mark.parametrize("line", ["machine {host} login x password from-netrc", "default login x password from-netrc"])
def test_netrc_is_not_read(private: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    put(private, "image")
    netrc = tmp_path / "netrc"
    netrc.write_text(line.format(host=private.address))
    monkeypatch.setenv("NETRC", str(netrc))
    assert Repository(f"{private.host}/ml/trainyard").manifest("image")
    assert not any("ZnJvbS1uZXRyYw" in one for one in private.authorizations)
    with Registry() as public:
        put(public, "image")
        assert Repository(f"{public.host}/ml/trainyard").manifest("image")
        assert public.authorizations == [""]


def test_requests_to_this_host_take_no_proxy(
    registry: Registry, place: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(registry, "image")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert place.manifest("image")


def test_what_a_registry_repeats_of_a_token_is_not_shown(private: Registry) -> None:
    put(private, "image")

    def answer(method: str, path: str, given: Answer) -> Answer:
        if "/manifests/" in path and given.status == 200:
            token = next(iter(private.tokens))
            error = {"code": "DENIED", "message": f"{token.upper()} (Bearer {token}) \x1b[31m?X-Amz-Signature=abc"}
            given.status, given.body = 403, json.dumps({"errors": [error]}).encode()
        return given

    private.after = answer
    with pytest.raises(StepFailed) as failed:
        Repository(f"{private.host}/ml/trainyard").manifest("image")
    shown = str(failed.value)
    assert next(iter(private.tokens)) not in shown and "\x1b" not in shown and "abc" not in shown


@pytest.mark.parametrize(
    "answered", [b"[]", b'{"token": 5}', b'{"token": "a\\nX-Injected: 1"}', b"<html>", b'{"token": ""}']
)
def test_an_odd_answer_of_a_token_service_is_one_line(private: Registry, answered: bytes) -> None:
    def answer(method: str, path: str, given: Answer) -> Answer:
        if path.startswith("/token"):
            given.body = answered
        return given

    private.after = answer
    with pytest.raises(InvalidAnswer, match=f"the token of {private.host}"):
        Repository(f"{private.host}/ml/trainyard").manifest("image")


@pytest.mark.parametrize("text", ["[]", '{"auths": []}', '{"auths": {"127.0.0.1:1": 5}}', '{"credHelpers": 5}', "{"])
def test_an_odd_docker_configuration_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: Registry
) -> None:
    (tmp_path / "config.json").write_text(text.replace("127.0.0.1:1", private.host))
    with pytest.raises((UserError, StepFailed)) as failed:
        Repository(f"{private.host}/ml/trainyard").manifest("image")
    assert "\n" not in str(failed.value)


# --- what is written is read back ------------------------------------------------------------------------------------


def test_a_manifest_is_not_written_to_where_a_redirect_leads(registry: Registry, place: Repository) -> None:
    def answer(method: str, path: str, given: Answer) -> Answer:
        if method == "PUT":
            given.status, given.headers["Location"] = 307, "https://203.0.113.1/elsewhere"
        return given

    image = put(registry, "image")
    registry.after = answer
    with pytest.raises(StepFailed, match=r"redirects what is written to '203\.0\.113\.1'"):
        place.put(image, "tag")


def test_a_registry_that_stores_another_manifest_is_noticed(registry: Registry, place: Repository) -> None:
    image, other = put(registry, "image"), put(registry, "other")

    def says_so(method: str, path: str, given: Answer) -> Answer:
        if method == "PUT":
            given.headers["Docker-Content-Digest"] = other.digest
        return given

    registry.after = says_so
    with pytest.raises(InvalidAnswer, match="tag was not stored"):
        place.put(image, "tag")

    def hides_it(method: str, path: str, given: Answer) -> Answer:
        if method == "PUT":
            registry.tags["tag"] = other.digest
        return given

    registry.after = hides_it
    with pytest.raises(StepFailed, match=f"tag is {other.digest[:19]} after it was set to {image.digest[:19]}"):
        place.tag(image, "tag")


def test_an_index_with_two_images_for_a_platform_is_refused() -> None:
    def index(*platforms: dict[str, Any]) -> dict[str, Any]:
        return {"manifests": [{"digest": f"sha256:{number}", "platform": one} for number, one in enumerate(platforms)]}

    amd64, unknown = {"os": "linux", "architecture": "amd64"}, {"os": "unknown", "architecture": "unknown"}
    arm64 = {"os": "linux", "architecture": "arm64"}
    for same in ((amd64, amd64), (amd64, {**amd64, "variant": "v1"}), (arm64, {**arm64, "variant": "v8"})):
        with pytest.raises(StepFailed, match=r"two images for linux/a..64, sha256:0 and sha256:1"):
            image_index.images(index(*same))
    with_variants = index({**amd64, "variant": "v3"}, amd64, arm64, unknown, unknown)
    assert image_index.images(with_variants) == {
        "linux/amd64": "sha256:1",
        "linux/arm64": "sha256:2",
        "linux/amd64/v3": "sha256:0",
    }
    windows = {"os": "windows", "architecture": "amd64"}
    versions = index({**windows, "os.version": "10.0.1"}, {**windows, "os.version": "10.0.2"})
    assert list(image_index.images(versions)) == ["windows/amd64", "windows/amd64/10.0.2"]


def test_a_list_that_never_ends_is_given_up(
    registry: Registry, place: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page names another one."""
    monkeypatch.setattr("trainyard.oci.registry._MOST_PAGES", 3)
    numbers = itertools.count()

    def answer(method: str, path: str, given: Answer) -> Answer:
        given.headers["Link"] = f'</v2/ml/trainyard/tags/list?page={next(numbers)}>; rel="next"'
        return given

    registry.after = answer
    with pytest.raises(InvalidAnswer, match="has no end"):
        place.tags()
    assert len(registry.requests) == 3


def test_a_digest_of_an_unknown_algorithm_cannot_be_compared(registry: Registry, place: Repository) -> None:
    registry.blobs["blake3:00"] = b"data"
    with pytest.raises(InvalidAnswer, match="nothing of it is used"):
        place.blob("blake3:00")
    with pytest.raises(InvalidAnswer, match="blake3 is not known"), place.stream("blake3:00", 4):
        pass


def test_an_index_in_an_index_is_one_line(registry: Registry, place: Repository) -> None:
    inner = Manifest.of({"manifests": []}, f"{OCI}.index.v1+json")
    registry.put_manifest("inner", inner.media_type, inner.body)
    entry = {"mediaType": inner.media_type, "digest": inner.digest, "size": len(inner.body)}
    outer = Manifest.of(
        {"manifests": [entry | {"platform": {"os": "linux", "architecture": "amd64"}}]}, inner.media_type
    )
    registry.put_manifest("outer", outer.media_type, outer.body)
    with pytest.raises(StepFailed, match="is an image index, where one image is expected"):
        inventory.remote(f"{place.name}:outer")


def test_a_tag_is_moved_away_from_what_is_no_image(
    registry: Registry, place: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    image, other = put(registry, "image"), put(registry, "other")
    entries = [
        {"mediaType": one.media_type, "digest": one.digest, "size": len(one.body)}
        | {"platform": {"os": "linux", "architecture": "amd64"}}
        for one in (image, other)
    ]
    both = Manifest.of({"manifests": entries}, f"{OCI}.index.v1+json")
    registry.put_manifest("tf-cpu", both.media_type, both.body)
    with pytest.raises(StepFailed, match="two images for linux/amd64"):
        promotion.promote(NAMED, place, both.digest)
    promotion.promote(NAMED, place, image.digest)
    assert "tf-cpu is no image that can be read (the image index has two images" in capsys.readouterr().err
    assert set(tags(registry).values()) == {image.digest} and registry.tags["tf-cpu.previous"] == both.digest


# --- two promotes at once --------------------------------------------------------------------------------------------


def tags(registry: Registry) -> dict[str, str]:
    return {name: digest for name, digest in registry.tags.items() if name in ("tf-cpu", f"tf-cpu-{VERSION}")}


def promote_on_another_host(registry: Registry, digest: str, after_write: int) -> None:
    """Move both tags right after the n-th write of a command, as a host without this lock does."""
    written = 0

    def answer(method: str, path: str, given: Answer) -> Answer:
        nonlocal written
        if method == "PUT" and "previous" not in path:
            written += 1
            if written == after_write:
                registry.tags["tf-cpu"] = registry.tags[f"tf-cpu-{VERSION}"] = digest
        return given

    registry.after = answer


@pytest.mark.parametrize("after_write", [1, 2])
def test_a_promote_of_another_host_in_between_leaves_no_mixed_tags(
    registry: Registry, place: Repository, after_write: int
) -> None:
    """After the first write, this one has the last word; after the second, the other one, and this one says so."""
    ours, theirs = put(registry, "ours"), put(registry, "theirs")
    promote_on_another_host(registry, theirs.digest, after_write)
    if after_write == 1:
        promotion.promote(NAMED, place, ours.digest)
    else:
        with pytest.raises(StepFailed, match=f"are {theirs.digest[:19]}, not {ours.digest[:19]}: another process"):
            promotion.promote(NAMED, place, ours.digest)
    assert set(tags(registry).values()) == {(ours if after_write == 1 else theirs).digest} and len(tags(registry)) == 2


def test_tags_that_change_all_the_time_are_no_success(registry: Registry, place: Repository) -> None:
    ours, theirs = put(registry, "ours"), put(registry, "theirs")

    def answer(method: str, path: str, given: Answer) -> Answer:
        if method == "PUT" and "previous" not in path:
            registry.tags[f"tf-cpu-{VERSION}"] = theirs.digest
        return given

    registry.after = answer
    with pytest.raises(StepFailed, match="other processes move them all the time"):
        promotion.promote(NAMED, place, ours.digest)
    assert sum(one.startswith("PUT") for one in registry.requests) < 10


@pytest.mark.parametrize("command", ["promote", "rollback"])
def test_after_a_kill_between_the_tags_the_next_command_names_them(
    registry: Registry, place: Repository, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [put(registry, name) for name in ("one", "two", "three")]
    for one in images[:2]:
        promotion.promote(NAMED, place, one.digest)
    written = 0

    def killed(method: str, path: str) -> None:
        nonlocal written
        written += method == "PUT" and "previous" not in path
        if written == 2:
            raise ConnectionError

    registry.before = killed
    with pytest.raises(StepFailed):
        promotion.promote(NAMED, place, images[2].digest)
    assert len(set(tags(registry).values())) == 2
    registry.before = lambda method, path: None
    capsys.readouterr()
    if command == "promote":
        promotion.promote(NAMED, place, images[2].digest)
    else:
        promotion.rollback(NAMED.name, place)
    assert (
        f"tf-cpu is {images[1].digest[:19]} and tf-cpu-{VERSION} is {images[2].digest[:19]}" in capsys.readouterr().err
    )
    assert len(set(tags(registry).values())) == 1
