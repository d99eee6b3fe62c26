"""Any environment and any response leads to a decision, or to one line and exit status 1, 2 or 138 (R15.4)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher import cli, fetch
from launcher.cluster import resolve
from launcher.coordinates import Cluster
from launcher.errors import LaunchError
from launcher.readers import first_node
from launcher.settings import VARIABLES, Settings
from launcher.sources import SOURCES
from launcher.tpu_vm import slice_from_env
from launching import cluster_spec
from tests import environment
from tests.examples import examples

SECRET = "s3cr3t-of-the-user"
TOKEN = "ya29.token-of-the-server"

NAMES = [
    "PJRT_DEVICE", "XRT_TPU_CONFIG", "XRT_DEVICE_MAP", "XRT_WORKERS", "GPU_NUM_DEVICES", "CPU_NUM_DEVICES",
    "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH", "TPU_SKIP_MDS_QUERY",
    "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "TPU_HOST_BOUNDS", "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_VISIBLE_CHIPS", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "TPU_CONFIG",
    "TPU_NODE_NAME", "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "MASTER_ADDR",
    "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT",
    "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "CLUSTER_SPEC", "TF_CONFIG", "JOB_COMPLETION_INDEX", "JOBSET_NAME",
    "REPLICATED_JOB_NAME", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID",
    "AIP_MODEL_DIR", "CLOUD_ML_HP_METRIC_FILE", "CLOUD_ML_TRIAL_ID", "GCE_METADATA_HOST", "TPU_API_ENDPOINT",
    *(name for name in VARIABLES if name not in ("LAUNCHER_SYSROOT", "LAUNCHER_TPU_ATTEMPTS")),
]  # fmt: skip

COORDINATES = sorted(
    {name for source in SOURCES for name in source.signals + source.variables}
    | {"MASTER_ADDR", "MASTER_PORT", "NNODES", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST", "PMIX_NAMESPACE",
       "SLURM_TASKS_PER_NODE", "OMPI_MCA_orte_local_daemon_uri", "VC_WORKER_HOSTS", "VC_WORKER_NUM", "VC_PS_HOSTS",
       "LOCAL_RANK", "LAUNCHER_MASTER_ADDR", "LAUNCHER_MASTER_PORT", "TPU_WORKER_HOSTNAMES"}
)  # fmt: skip

# Text of an environment: no NUL; bytes that are not UTF-8 are surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
HOST = st.sampled_from(["a:2222", "b", "10.0.0.1:1", "grpc://1.2.3.4:8470", "[::1]:1", "fd00::1", "a b", ""])
CLUSTER = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(
            st.sampled_from(["workerpool0", "workerpool1", "workerpool2", "chief", "master", "worker", "ps"]),
            st.lists(HOST, max_size=3) | JSON,
            max_size=4,
        )
        | JSON,
        "task": st.fixed_dictionaries(
            {}, optional={"type": st.sampled_from(["workerpool0", "workerpool1", "chief", "worker", "ps"]) | JSON,
                          "index": st.integers(-1, 3) | JSON, "trial": JSON},
        )
        | JSON,
        "job": JSON,
    },
).map(json.dumps)  # fmt: skip
TPU_CONFIG = st.fixed_dictionaries(
    {}, optional={"project": st.just("p") | JSON, "zone": st.just("z") | JSON, "tpu_node_name": st.just("tpu-a") | JSON}
).map(json.dumps)
WORDS = st.sampled_from(
    [
        "", " ", "0", "1", "2", "-1", "3", "99999999999", "9" * 5000, "\u0663", "\udcff", "true", "TPU", "CPU", "cuda",
        "local", "tpu-a", "auto",
        "v4-8", "v4-16", "v3-16", "tpu7x-8", "2,2,1", "1,1,2", "a,b", "h0,h1,h2,h3", "1.2.3.4", "1.2.3.4:8470",
        "grpc://1.2.3.4:8470", "grpc://1.2.3.4:1,grpc://1.2.3.5:1", "grpc://", "tpu_worker;0;1.2.3.4:8470",
        "1:3", "c10d",
        "static", "quiet", "explain", "torch_xla==1.12", "torch_xla==2.0", "torch_xla==2.9.0", "torch==2.9",
        "tensorflow==2.20", "jax==0.4.30", "jax==0.10.2",
        "projects/p/locations/z/nodes/n", "http://x", "nan", "inf", "1e3", "/", "/dev/null", "gs://b/x",
        "tpu-node", "tpu-local",
    ]
)  # fmt: skip
VALUE = WORDS | TEXT | CLUSTER | TPU_CONFIG | JSON.map(json.dumps)
ENVIRONMENT = st.dictionaries(st.sampled_from(NAMES + COORDINATES), VALUE, max_size=8)
PLACE = (
    st.sampled_from(
        ["n[0-1]", "n[01-03,07],m", "n[", "n[]", "2(x2)", "3,1", "2(x", "16", "8", "4", "1", "0", "4294967290", "::1",
         "[::1]:99", "fd00::1,fd00::2", "j-worker-0.j,j-worker-1.j", '["algo-2", "algo-1"]', '["algo-1"]', "algo-2",
         "88735744.0;tcp://192.0.2.2,172.17.0.1:38957;tcp6://[fd00::2]:55361", ";;", "1.0;tcp://:", "job-0.svc", "1:3"]
    )
    | VALUE
)  # fmt: skip

NODE = st.fixed_dictionaries(
    {},
    optional={
        "state": st.sampled_from(["READY", "CREATING", "PREEMPTED", "STOPPED", ""]) | JSON,
        "health": st.sampled_from(["HEALTHY", "TIMEOUT"]) | JSON,
        "networkEndpoints": st.lists(
            st.fixed_dictionaries({}, optional={"ipAddress": st.just("10.1.2.3") | JSON, "port": st.just(8470) | JSON})
            | JSON,
            max_size=3,
        )
        | JSON,
        "ipAddress": JSON,
        "port": JSON,
        "acceleratorType": st.just("v3-8") | JSON,
        "error": JSON,
    },
).map(lambda data: json.dumps(data).encode())
TOKEN_BODY = st.just(json.dumps({"access_token": TOKEN, "expires_in": 3600}).encode())
BODY = NODE | TOKEN_BODY | st.binary(max_size=60) | st.sampled_from([b"p", b"projects/1/zones/z"])


@st.composite
def http_answers(draw: st.DrawFn) -> bytes:
    """Bytes of a response: mostly HTTP with any status and body, sometimes any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=80))
    status = draw(st.sampled_from([200, 200, 200, 200, 400, 401, 403, 404, 429, 500, 503, 301, 99, 1000]))
    body = draw(BODY)
    header = draw(
        st.sampled_from(
            [b"", b"Content-Length: %d\r\n" % len(body), b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"]
        )
    )
    return b"HTTP/1.1 %d X\r\n%s\r\n%s" % (status, header, body)


class FakeSocket:
    """A connection that returns these bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = io.BytesIO(raw)

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def sendall(self, data: bytes) -> None:
        assert data.startswith(b"GET /") and data.endswith(b"\r\n\r\n")
        assert data.count(b"\r\n\r\n") == 1  # nothing in a URL or a token can add a header

    def recv(self, size: int) -> bytes:
        return self._raw.read(size)

    def close(self) -> None:
        self._raw.close()


class FakeNetwork:
    """A network with generated responses, and a clock that only sleeping advances."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self._asked = 0
        self.slept = 0.0

    def resolve(self, host: str, port: int, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(0, type, 0, "", (host, port))]

    def connect(self, address: tuple[str, int], timeout: float) -> FakeSocket:
        assert timeout > 0
        if not self._answers:
            raise OSError(101, "Network is unreachable")
        answer = self._answers[min(self._asked, len(self._answers) - 1)]
        self._asked += 1
        return FakeSocket(answer)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


def _launch(env: dict[str, str], answers: list[bytes], argv: list[str], root: str) -> tuple[int, str, str, float]:
    """Run the launcher with these responses: status, stdout, stderr, seconds slept."""
    network = FakeNetwork(answers)
    full = {
        **env,
        "LAUNCHER_SYSROOT": root,
        "LAUNCHER_TPU_ATTEMPTS": "5",
        "MY_SECRET_TOKEN": SECRET,
        "PATH": "/usr/bin",
    }
    out, err = io.StringIO(), io.StringIO()
    real = dict(os.environ)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fetch.socket, "create_connection", network.connect))
        stack.enter_context(mock.patch.object(fetch.socket, "getaddrinfo", network.resolve))
        stack.enter_context(mock.patch("time.sleep", network.sleep))
        stack.enter_context(mock.patch("time.monotonic", lambda: network.slept))
        stack.enter_context(mock.patch("ssl.create_default_context", mock.Mock(side_effect=OSError(0, "no TLS here"))))
        stack.enter_context(mock.patch("launcher.tpu_node.cloud.google_auth_token", lambda image, env: ""))
        stack.enter_context(environment.only(full))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        status = cli.run(argv)
    assert dict(os.environ) == real
    return status, out.getvalue(), err.getvalue(), network.slept


def _check(env: dict[str, str], status: int, out: str, err: str, slept: float) -> None:
    retryable = env.get("LAUNCHER_RETRYABLE_EXIT", "").strip()
    assert status in (0, 1, 2, 138) or str(status) == retryable
    assert "Traceback" not in err and "internal error" not in err
    assert SECRET not in out + err and TOKEN not in out + err
    lines = err.splitlines()
    assert all(line.startswith("launch: ") for line in lines)
    errors = [line for line in lines if line.startswith("launch: error: ")]
    assert len(errors) == (1 if status else 0)
    if status:
        assert out == "" and lines[-1] == errors[0]
    # Five attempts: at most four sleeps, and none longer than the interval.
    interval = env.get("LAUNCHER_TPU_INTERVAL", "").strip() or "10"
    paced = 30.0 if env.get("LAUNCHER_REQUIRE_HEALTHY") else 0.0
    if slept:
        assert slept <= 4 * max(float(interval), paced) + 1e-6


# Deterministic: the same cases in every run, in a few seconds.
quick = settings(derandomize=True, database=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def root() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@quick
@given(env=ENVIRONMENT, json_mode=st.booleans())
def test_any_environment(root: str, env: dict[str, str], json_mode: bool) -> None:
    argv = ["--print-env", "--json"] if json_mode else ["--explain"]
    status, out, err, slept = _launch(env, [], argv, root)
    _check(env, status, out, err, slept)
    if status == 0 and json_mode:
        assert json.loads(out)["runtime"] in ("tpu-node", "tpu-local", "gpu", "cpu")


@quick
@given(answers=st.lists(http_answers(), max_size=8), env=ENVIRONMENT)
def test_any_response_for_a_tpu_node(root: str, answers: list[bytes], env: dict[str, str]) -> None:
    # Only LAUNCHER_* settings vary: the node is always requested.
    env = {name: value for name, value in env.items() if name.startswith("LAUNCHER_") and name != "LAUNCHER_RUNTIME"}
    env["TPU_NAME"] = "tpu-a"
    status, out, err, slept = _launch(env, answers, ["--print-env", "--json"], root)
    _check(env, status, out, err, slept)


@quick
@given(answers=st.lists(http_answers(), max_size=5))
def test_any_response_for_a_tpu_vm(answers: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dev").mkdir()
        (Path(folder) / "dev" / "accel0").touch()
        env = {"LAUNCHER_FRAMEWORK": "torch_xla==2.9.0"}
        status, out, err, slept = _launch(env, answers, ["--print-env", "--json"], folder)
    _check(env, status, out, err, slept)
    assert status == 0
    assert json.loads(out)["exports"]["PJRT_DEVICE"] == "TPU"


@quick
@given(spec=CLUSTER | JSON.map(json.dumps), name=st.sampled_from(["CLUSTER_SPEC", "TF_CONFIG"]))
def test_any_cluster_gives_a_rank_inside_the_world_or_one_line(spec: str, name: str) -> None:
    env = {name: spec}
    try:
        found = resolve(env, Settings(env))
    except LaunchError as error:
        assert error.status == 2
        assert "\n" not in error.message
        return
    _check_coordinates(found)


def _check_coordinates(found: Cluster) -> None:
    """A rank inside the world, and an address if there is more than one process."""
    assert found.nnodes >= 1
    assert (found.node_rank is None) == (found.role in ("server", "evaluator"))
    assert found.node_rank is None or 0 <= found.node_rank < found.nnodes
    assert found.master_addr
    assert 0 <= found.master_port < 65536
    if found.nnodes > 1 or found.task:
        assert found.master_port
    if found.task:
        assert 0 <= found.task.rank < found.task.world_size
        assert found.role == ("worker" if found.task.rank else "master")


@settings(quick, max_examples=examples(400))
@given(env=st.dictionaries(st.sampled_from(COORDINATES), PLACE, max_size=8))
def test_any_coordinates_give_a_rank_inside_the_world_or_one_line(env: dict[str, str]) -> None:
    try:
        found = slice_from_env(env) if env.get("TPU_WORKER_HOSTNAMES", "").strip() else None
        _check_coordinates(resolve(env, Settings(env), found))
    except LaunchError as error:
        assert error.status == 2
        assert "\n" not in error.message


# Rank, size, and what else says where this process is: each pair alone means one of three processes.
SEVERAL: list[dict[str, str]] = [
    {"RANK": "1", "WORLD_SIZE": "3"},
    {"NODE_RANK": "1", "NNODES": "3"},
    {"PET_NODE_RANK": "1", "PET_NNODES": "3"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
    {"PMI_RANK": "1", "PMI_SIZE": "3"},
    {"PMI_ID": "1", "MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "1"},
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "3"},
    {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"},
    {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "3"},
    {"JOB_COMPLETION_INDEX": "1", "NNODES": "3"},
    {"MEGASCALE_SLICE_ID": "1", "MEGASCALE_NUM_SLICES": "3"},
    {"SM_CURRENT_HOST": "b", "SM_HOSTS": '["a", "b", "c"]'},
    {"NODE_RANK": "1", "NUM_NODES": "3"},
    {"LEPTON_JOB_WORKER_INDEX": "1", "LEPTON_JOB_TOTAL_WORKERS": "3"},
    {"BEAKER_REPLICA_RANK": "1", "BEAKER_REPLICA_COUNT": "3"},
    {"MF_PARALLEL_NODE_INDEX": "1", "MF_PARALLEL_NUM_NODES": "3"},
    {"NGC_ARRAY_INDEX": "1", "NGC_ARRAY_SIZE": "3"},
    {"BATCH_TASK_INDEX": "1", "BATCH_TASK_COUNT": "3"},
    {"CLOUD_RUN_TASK_INDEX": "1", "CLOUD_RUN_TASK_COUNT": "3"},
    {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"},
    {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_LOCAL_RANK": "0",
     "MV2_COMM_WORLD_LOCAL_SIZE": "1"},
    {"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "3"},
    {"CLUSTER_SPEC": cluster_spec([1, 2], "workerpool1", 0)},
    {"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}'},
]  # fmt: skip


@settings(quick, max_examples=examples(400))
@given(
    several=st.sampled_from(SEVERAL),
    broken=st.sampled_from(["", " ", "x", "-1", "1.5", "\u0663", "99999999999", "a b", "0x1", "1:", ":", "+1"]),
    where=st.integers(0, 2),
    address=st.sampled_from([{}, {"MASTER_ADDR": "m"}, {"MASTER_ADDR": "m", "MASTER_PORT": "1"}]),
)
def test_one_of_several_processes_is_never_node_0_of_1(
    several: dict[str, str], broken: str, where: int, address: dict[str, str]
) -> None:
    """With its rank and size, or with one of them broken: coordinates in the world of three, or one line."""
    env = {**several, **address}
    names = sorted(several)
    if where < len(names):
        env[names[where]] = broken
    rank_is_left = [name for name in names if "RANK" in name or "INDEX" in name or "ID" in name or "HOST" in name]
    if not any(env[name] in ("1", "b") for name in rank_is_left) and len(names) > 1:
        return  # without a rank a size says nothing about this process (R13.18)
    if env.get("JOB_COMPLETION_INDEX") and not env.get("NNODES", "").strip():
        return  # pods that are independent of each other (R13.6)
    if "VC_WORKER_NUM" in env and env["VC_WORKER_NUM"] != "3":
        return  # no plugin svc: pods that are independent of each other (R13.15)
    if "SM_HOSTS" in env and not env["SM_HOSTS"].strip():
        return  # the name of a host is no rank (R13.16)
    if len(names) == 1 and not broken.strip() and where == 0:
        return  # the only variable is empty
    try:
        found = resolve(env, Settings(env))
    except LaunchError as error:
        assert error.status == 2
        return
    size = found.task.world_size if found.task else found.nnodes
    rank = found.task.rank if found.task else found.node_rank
    assert size > 1 and rank, (env, found.source)


@quick
@given(nodes=st.text("n0123[],-x.:", max_size=20))
def test_any_list_of_nodes(nodes: str) -> None:
    assert not {"[", "]", ","} & set(first_node(nodes))


#: What the launcher reads of a recipe, in which any value can be another.
RECIPE = st.fixed_dictionaries(
    {
        "name": st.just("test") | JSON,
        "framework": st.fixed_dictionaries({"name": st.just("torch") | JSON, "version": st.just("2.9") | JSON}) | JSON,
        "commands": st.dictionaries(TEXT, st.just(["x"]) | JSON, max_size=3) | JSON,
        "default": st.just("") | JSON,
        "accelerator": st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["none", "nvidia", "tpu"]) | JSON,
                "cuda": st.just("13.2") | JSON,
                "driver": st.just("580") | JSON,
                "gpus": st.just("9.0+PTX") | JSON,
            }
        )
        | JSON,
    }
)


@quick
@given(content=st.binary(max_size=200) | (JSON | RECIPE).map(lambda data: json.dumps(data).encode()))
def test_any_recipe(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "opt" / "trainyard" / "recipe.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        status, out, err, slept = _launch({}, [], ["--explain"], folder)
    _check({}, status, out, err, slept)


@quick
@given(
    argv=st.lists(
        st.sampled_from(["--print-env", "--json", "--explain", "--runtime", "--runtime=gpu", "--force", "--", "x"])
        | TEXT,
        max_size=5,
    )
)
def test_any_command_line(root: str, argv: list[str]) -> None:
    started: Callable[..., Any] = mock.Mock(side_effect=LaunchError("started", 127))
    with mock.patch("launcher.process.replace", started), mock.patch("launcher.supervisor.supervise", started):
        status, _, err, _ = _launch({}, [], argv, root)
    assert status in (0, 2, 127)
    assert "internal error" not in err
