"""Real clients accept the fake Google Cloud, and the variables that the launcher exports.

google-auth runs in this Python; cloud-tpu-client 0.10 in a separate folder, because it pins google-api-python-client
1.8.0; TensorFlow's TPUClusterResolver and torch_xla's `tpu.py` inside the built images, without a network.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import ENGINE

from trainyard.common.docker_engine import resource_labels
from trainyard.sandbox.fakes.google_cloud import GoogleCloud

pytestmark = pytest.mark.concurrent

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "scripts" / "trainyard" / "sandbox" / "fakes" / "google_cloud.py"
LAUNCHER = [sys.executable, "-I", "-S", str(ROOT / "launcher")]
DISCOVERY = "/discovery/v1/apis/{api}/{apiVersion}/rest"
CONFIG = json.dumps({"project": "test-project", "zone": "us-central1-c", "tpu_node_name": "tpu-a"})

CLOUD_TPU_CLIENT = Path(__file__).with_name("cloud-tpu-client.lock")
GOOGLE_API_CLIENT = Path(__file__).with_name("google-api-client.lock")


def environment(cloud: GoogleCloud, **more: str) -> dict[str, str]:
    """An environment in which every Google client uses the fake, without a developer's credentials."""
    return {
        "PATH": os.environ["PATH"],
        "GCE_METADATA_HOST": cloud.address,
        "GCE_METADATA_IP": cloud.address,
        "GCE_METADATA_ROOT": cloud.address,
        "TPU_API_DISCOVERY_URL": cloud.url + DISCOVERY,
        "TPU_API_ENDPOINT": cloud.url,
        "LAUNCHER_TPU_INTERVAL": "0.05",
        "CLOUDSDK_CONFIG": "/nonexistent",
        **more,
    }


def python(code: str, env: dict[str, str], executable: str = sys.executable) -> Any:
    """Run code in a new Python process; return the JSON that it prints."""
    done = subprocess.run([executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def cloud() -> Iterator[GoogleCloud]:
    with GoogleCloud() as running:
        yield running


GOOGLE_AUTH = """
import json, google.auth, google.auth.transport.requests
credentials, project = google.auth.default()
credentials.refresh(google.auth.transport.requests.Request())
print(json.dumps([project, credentials.token, credentials.service_account_email]))
"""


def test_google_auth_gets_its_token_from_the_fake(cloud: GoogleCloud) -> None:
    assert python(GOOGLE_AUTH, environment(cloud)) == [
        cloud.project,
        cloud.token,
        "trainer@fake-project.iam.gserviceaccount.com",
    ]
    assert {"probe", "metadata", "token"} <= set(cloud.counts())


def service_account(folder: Path, token_uri: str) -> Path:
    """A key file whose tokens come from this address. The key is generated here."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    path = folder / "key.json"
    data = {"type": "service_account", "client_email": "a@b.c", "private_key": pem, "token_uri": token_uri}
    path.write_text(json.dumps({**data, "private_key_id": "1", "project_id": "p"}))
    return path


def test_the_launcher_falls_back_to_google_auth(cloud: GoogleCloud, tmp_path: Path) -> None:
    """Without a metadata server, google-auth in the image's own Python gets the token for a service account's key."""
    manifest = {
        "framework": "tensorflow",
        "versions": {},
        "default": "t",
        "trainers": {"t": [sys.executable, "-m", "t"]},
    }
    image = tmp_path / "opt" / "trainyard" / "image.json"
    image.parent.mkdir(parents=True)
    image.write_text(json.dumps(manifest))
    key = service_account(tmp_path, cloud.url + "/token")
    env = environment(cloud, TPU_CONFIG=CONFIG, LAUNCHER_SYSROOT=str(tmp_path), LAUNCHER_TPU_ATTEMPTS="1")
    env.update(GOOGLE_APPLICATION_CREDENTIALS=str(key), GCE_METADATA_HOST="127.0.0.1:1")
    done = subprocess.run([*LAUNCHER, "--print-env", "--json"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["endpoints"] == ["10.1.2.3:8470"]
    assert cloud.counts() == {"token": 1, "node": 1}
    del env["GOOGLE_APPLICATION_CREDENTIALS"]
    done = subprocess.run([*LAUNCHER, "--print-env", "--json"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 138
    assert "no access token" in done.stderr


CLIENT = """
import json, os, sys
sys.path.insert(0, {site!r})
from cloud_tpu_client import Client
try:
    client = Client({arguments})
    os.environ.pop("http_proxy", None)
    print(json.dumps([client.network_endpoints(), client._project, client._zone]))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture
def client(installed: Callable[[Path], Path]) -> Callable[..., Any]:
    """Run cloud-tpu-client's `Client(arguments).network_endpoints()`: endpoints, project and zone; or the error."""
    site = installed(CLOUD_TPU_CLIENT)

    def run(arguments: str, env: dict[str, str]) -> Any:
        return python(CLIENT.format(site=str(site), arguments=arguments), env)

    return run


PLACE = "project='test-project', zone='us-central1-c'"


def test_cloud_tpu_client_resolves_by_name(cloud: GoogleCloud, client: Callable[..., Any]) -> None:
    found = client(f"'tpu-a', {PLACE}", environment(cloud))
    assert found == [[{"ipAddress": "10.1.2.3", "port": 8470}], "test-project", "us-central1-c"]
    assert {"discovery", "token", "node"} <= set(cloud.counts())


def test_cloud_tpu_client_gets_project_and_zone_from_the_metadata_server(
    cloud: GoogleCloud, client: Callable[..., Any]
) -> None:
    """It hard-codes metadata.google.internal; a proxy redirects it to the fake."""
    found = client("'tpu-a'", environment(cloud, http_proxy=cloud.url))
    assert found == [[{"ipAddress": "10.1.2.3", "port": 8470}], "test-project", "us-central1-c"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        pytest.param({"states": ["CREATING"]}, "RuntimeError", 'not yet ready; state: "CREATING"', id="creating"),
        pytest.param({"node_fields": {"state": None}}, "RuntimeError", 'not yet ready; state: "None"', id="no-state"),
        pytest.param({"node": "other"}, "ValueError", "Could not lookup TPU metadata", id="unknown-node"),
        pytest.param({"faults": {"node": ["status:403*"]}}, "ValueError", "HttpError 403", id="403"),
        pytest.param({"faults": {"node": ["status:500*"]}}, "ValueError", "HttpError 500", id="500"),
    ],
)
def test_cloud_tpu_client_fails_on_the_fake_as_on_the_real_api(
    client: Callable[..., Any], options: dict[str, Any], kind: str, message: str
) -> None:
    with GoogleCloud(**options) as cloud:
        error = client(f"'tpu-a', {PLACE}", environment(cloud))
    assert error[0] == kind
    assert message in error[1]


def test_cloud_tpu_client_ignores_tpu_config_and_accepts_what_the_launcher_exports(
    cloud: GoogleCloud, client: Callable[..., Any]
) -> None:
    env = environment(cloud, TPU_CONFIG=CONFIG, LAUNCHER_FRAMEWORK="tensorflow==2.21.0")
    assert client("", env) == ["ValueError", "Please provide a TPU Name to connect to."]
    done = subprocess.run([*LAUNCHER, "--print-env", "--json"], env=env, capture_output=True, text=True, timeout=60)
    exports = json.loads(done.stdout)["exports"]
    before = len(cloud.requests)
    assert client("", {**env, **exports}) == [[{"ipAddress": "10.1.2.3", "port": "8470"}], None, None]
    assert len(cloud.requests) == before  # with grpc:// it makes no request


def _readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make a file readable for the image's user; pytest creates folders for their owner only."""
    entry.mode |= 0o555
    return entry


def _tar(files: dict[str, bytes], folders: dict[str, Path]) -> bytes:
    """A tar archive of files, and of the contents of folders, below /client."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"client/{name}")
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
        for name, folder in folders.items():
            tar.add(folder, f"client/{name}", filter=_readable)
    return buffer.getvalue()


@pytest.fixture
def in_image(built_image: Callable[[str], str]) -> Iterator[Callable[..., Any]]:
    """Run code with the Python of a built image, without a network; return the JSON of its last line.

    The fake is /client/google_cloud.py; the folder of packages, if any, is /client/packages.
    """
    made: list[Any] = []

    def run(target: str, code: str, packages: Path | None = None) -> Any:
        container = ENGINE.client.containers.create(
            built_image(target),
            ["--", "python", "/client/main.py"],
            entrypoint=["launch"],
            environment={"LAUNCHER_LOG": "quiet", "LAUNCHER_RUNTIME": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
            network_mode="none",
            labels=resource_labels("test"),
        )
        made.append(container)
        files = {"main.py": code.encode(), "google_cloud.py": FAKE.read_bytes()}
        container.put_archive("/", _tar(files, {"packages": packages} if packages else {}))
        container.start()
        status = container.wait(timeout=300)["StatusCode"]
        assert status == 0, container.logs().decode()[-3000:]
        return json.loads(container.logs(stderr=False).decode().splitlines()[-1])

    yield run
    for container in made:
        container.remove(force=True)


TENSORFLOW = """
import json, os, subprocess, sys
sys.path[:0] = ["/client", "/client/packages"]
for name in ("TPU_NAME", "TPU_CONFIG", "PJRT_DEVICE"):
    os.environ.pop(name, None)
from google_cloud import GoogleCloud

def resolve(env, **arguments):
    import tensorflow as tf  # only now: oauth2client, if it is here, reads the environment when it is imported
    before = dict(os.environ)
    os.environ.update(env)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(**arguments)
        return [resolver.cluster_spec().as_dict(), resolver.master()]
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        os.environ.clear()
        os.environ.update(before)

def surroundings(cloud):
    return {
        "GCE_METADATA_HOST": cloud.address, "GCE_METADATA_IP": cloud.address, "GCE_METADATA_ROOT": cloud.address,
        "TPU_API_DISCOVERY_URL": cloud.url + "/discovery/v1/apis/{api}/{apiVersion}/rest",
        "TPU_API_ENDPOINT": cloud.url, "CLOUDSDK_CONFIG": "/nonexistent", "LAUNCHER_TPU_INTERVAL": "0.05",
    }

def launch(env):
    words = [sys.executable.rpartition("/")[2], "-I", "-S", "/usr/local/bin/launch", "--print-env", "--json"]
    full = {"PATH": os.environ["PATH"], **env}
    return json.loads(subprocess.run(words, env=full, stdout=subprocess.PIPE, check=True).stdout)

CONFIG = json.dumps({"project": "test-project", "zone": "us-central1-c", "tpu_node_name": "tpu-a"})
"""

BY_NAME = (
    TENSORFLOW
    + """
found = {}
with GoogleCloud(states=["CREATING", "READY"]) as cloud:
    os.environ.update(surroundings(cloud))
    found["creating"] = resolve({"TPU_CONFIG": CONFIG})
    found["TPU_CONFIG"] = resolve({"TPU_CONFIG": CONFIG})
    found["name"] = resolve({}, tpu="tpu-a")
    found["unknown-node"] = resolve({}, tpu="nonexistent-tpu")
    found["name-in-KUBE"] = resolve({"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "tpu-a"})
    found["counts"] = cloud.counts()
print(json.dumps(found))
"""
)


def test_tensorflow_resolves_by_name(in_image: Callable[..., Any], installed: Callable[[Path], Path]) -> None:
    found = in_image("tf-cpu", BY_NAME, installed(GOOGLE_API_CLIENT))
    resolved = [{"worker": ["10.1.2.3:8470"]}, "grpc://10.1.2.3:8470"]
    assert found["creating"][0] == "RuntimeError"
    assert 'state: "CREATING"' in found["creating"][1]
    assert found["TPU_CONFIG"] == found["name"] == found["name-in-KUBE"] == resolved
    assert found["unknown-node"][0] == "ValueError"
    assert "Could not lookup TPU metadata" in found["unknown-node"][1]
    assert {"metadata", "token", "discovery", "node"} <= set(found["counts"])


LAUNCHED = (
    TENSORFLOW
    + """
found = {"requests": {}}
with GoogleCloud(states=["CREATING", "READY"], endpoints=["10.1.2.3:8470"]) as one, \\
        GoogleCloud(endpoints=[f"10.2.3.{n}:8470" for n in (4, 5, 6, 7)]) as four:
    cases = {
        "TPU_CONFIG": (one, {"TPU_CONFIG": CONFIG}),
        "TPU_NAME": (one, {"TPU_NAME": "tpu-a"}),
        "name-in-KUBE": (one, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "tpu-a"}),
        "address-without-scheme": (one, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "10.120.27.5:8470"}),
        "grpc-address": (one, {"TPU_NAME": "grpc://10.0.0.1"}),
        "four-workers": (four, {"TPU_CONFIG": CONFIG}),
        "four-workers-by-name-in-KUBE": (four, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "tpu-a"}),
        "empty-KUBE": (one, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "", "TPU_CONFIG": CONFIG}),
    }
    for name, (cloud, env) in cases.items():
        launched = launch({**surroundings(cloud), **env})
        env = {key: value for key, value in {**surroundings(cloud), **env, **launched["exports"]}.items()
               if key not in launched["unsets"]}
        before = len(cloud.requests)
        found[name] = resolve(env)
        found["requests"][name] = len(cloud.requests) - before
print(json.dumps(found))
"""
)


def test_tensorflow_uses_what_the_launcher_exports_without_a_request(in_image: Callable[..., Any]) -> None:
    """The image contains neither google-api-python-client nor oauth2client."""
    found = in_image("tf-cpu", LAUNCHED)
    assert set(found.pop("requests").values()) == {0}
    one = [{"worker": ["10.1.2.3:8470"]}, "grpc://10.1.2.3:8470"]
    four = [{"worker": [f"10.2.3.{n}:8470" for n in (4, 5, 6, 7)]}, "grpc://10.2.3.4:8470"]
    assert found == {
        "TPU_CONFIG": one,
        "TPU_NAME": one,
        "name-in-KUBE": one,
        "address-without-scheme": [{"worker": ["10.120.27.5:8470"]}, "grpc://10.120.27.5:8470"],
        "grpc-address": [{"worker": ["10.0.0.1:8470"]}, "grpc://10.0.0.1:8470"],
        "four-workers": four,
        "four-workers-by-name-in-KUBE": four,
        "empty-KUBE": one,
    }


TORCH_XLA = """
import json, os, subprocess, sys
for name in ("PJRT_DEVICE", "TPU_CONFIG"):
    os.environ.pop(name, None)
import torch_xla
from torch_xla._internal import tpu

CASES = json.loads({cases!r})
found = {{}}
clean = dict(os.environ)
for name, (env, local) in CASES.items():
    full = {{"PATH": clean["PATH"], **env}}
    words = ["launch", "--print-env", "--json"]
    launched = json.loads(subprocess.run(words, env=full, stdout=subprocess.PIPE, check=True).stdout)
    os.environ.clear()
    os.environ.update({{**clean, **env, **launched["exports"]}})
    try:
        answer = [tpu.version(), tpu.worker_id(), tpu.get_worker_ips()]
        tpu.configure_topology(local, 4)
        names = ("TPU_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT")
        answer += [[os.environ[name] for name in names], len(os.environ["TPU_PROCESS_ADDRESSES"].split(","))]
    except Exception as error:
        answer = [type(error).__name__, str(error)]
    found[name] = answer
print(json.dumps(found))
"""

GKE = {"TPU_SKIP_MDS_QUERY": "true"}
ONE = {**GKE, "TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
XLA_CASES: dict[str, tuple[dict[str, str], int, list[Any]]] = {
    "v4-8": (
        {**ONE, "TPU_ACCELERATOR_TYPE": "v4-8", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
        3,
        [4, 0, ["localhost"], ["2,2,1", "3", "3", "8479"], 4],
    ),
    "v5litepod-4-without-worker-id": (
        {**ONE, "TPU_ACCELERATOR_TYPE": "v5litepod-4"},
        0,
        [5, 0, ["localhost"], ["2,2,1", "0", "0", "8476"], 4],
    ),
    "v3-8": ({**GKE, "TPU_ACCELERATOR_TYPE": "v3-8", "TPU_WORKER_ID": "0"}, 0,
             [3, 0, ["localhost"], ["2,2,1", "0", "0", "8476"], 4]),
    "v4-16": (
        {**GKE, "TPU_HOST_BOUNDS": "1,1,2", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_ACCELERATOR_TYPE": "v4-16",
         "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.130.0.31,10.130.0.30"},
        0,
        [4, 1, ["10.130.0.31", "10.130.0.30"], ["2,2,2", "4", "0", "8476"], 8],
    ),
    "v4-16-without-TPU_SKIP_MDS_QUERY": (
        {"TPU_HOST_BOUNDS": "1,1,2", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_ACCELERATOR_TYPE": "v4-16",
         "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"},
        0,
        [4, 1, ["a", "b"], ["2,2,2", "4", "0", "8476"], 8],
    ),
}  # fmt: skip


@pytest.mark.slow("tests/unit/launcher/test_tpu_vm.py")
def test_torch_xla_accepts_the_gke_variables_with_those_that_the_launcher_adds(in_image: Callable[..., Any]) -> None:
    cases = {name: (env, local) for name, (env, local, _) in XLA_CASES.items()}
    found = in_image("xla", TORCH_XLA.format(cases=json.dumps(cases)))
    assert found == {name: expected for name, (_, _, expected) in XLA_CASES.items()}


NEW_ENDPOINTS = """
import json, os, subprocess, sys
sys.path.insert(0, "/client")
for name in ("PJRT_DEVICE", "TPU_CONFIG"):
    os.environ.pop(name, None)
import torch_xla
from torch_xla._internal import tpu
from google_cloud import GoogleCloud

TPU_ENV = "ACCELERATOR_TYPE: 'v4-16'\\nHOST_BOUNDS: '1,1,2'\\nCHIPS_PER_HOST_BOUNDS: '2,2,1'\\nWORKER_ID: '1'\\n"
os.makedirs("/tmp/root/dev")
open("/tmp/root/dev/accel0", "w").close()
attributes = {"tpu-env": TPU_ENV, "worker-network-endpoints": "w-0.c.p.internal,w-1.c.p.internal"}
with GoogleCloud(attributes=attributes) as cloud:
    env = {"PATH": os.environ["PATH"], "LAUNCHER_SYSROOT": "/tmp/root", "GCE_METADATA_HOST": cloud.address,
           "LAUNCHER_FRAMEWORK": "torch_xla==2.9.0"}
    words = ["launch", "--print-env", "--json"]
    launched = json.loads(subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True).stdout)
try:
    tpu._get_metadata = attributes.__getitem__  # the response to its own request
    tpu.get_worker_ips()
    alone = "resolved"
except IndexError:
    alone = "IndexError"
os.environ.update(launched["exports"])
print(json.dumps([alone, tpu.version(), tpu.worker_id(), tpu.get_worker_ips()]))
"""


@pytest.mark.slow("tests/unit/launcher/test_tpu_vm.py")
def test_torch_xla_reads_plain_worker_network_endpoints_only_through_the_launcher(
    in_image: Callable[..., Any],
) -> None:
    assert in_image("xla", NEW_ENDPOINTS) == ["IndexError", 4, 1, ["w-0.c.p.internal", "w-1.c.p.internal"]]
