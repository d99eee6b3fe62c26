"""What the launcher costs, against a floor and against the recipe it replaces; everything in one run.

    python -m benchmarks.launcher [IMAGE]

In one container of IMAGE (a TensorFlow image, trainyard:tf-cpu by default), without a network, alternating:

    floor      python3 -I -S -c pass
    launch     the launcher, nothing to resolve, to the end of /bin/true
    launch     the same with a TPU node to resolve: token, one answer of the TPU API, from a fake on the loopback
    recipe     import tensorflow; TPUClusterResolver() -- against the same fake, with google-api-python-client and
               oauth2client, which it needs and the image has not; they are put beside it

Times are wall seconds from fork to exit. Memory is the peak resident set; it counts the measuring process at the fork,
so 15 MB is the least that can show.
Disk is what the recipe needs installed and the launcher does not.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import docker

ROOT = Path(__file__).resolve().parent.parent
FAKE = ROOT / "scripts" / "trainyard" / "sandbox" / "fakes" / "google_cloud.py"
#: What TensorFlow 2.21 needs to resolve a TPU's name beside what the image has.
GOOGLE_API_CLIENT = ("google-api-python-client", "oauth2client")
#: The launcher's targets: at most so many times the floor; at least so much faster and smaller than the recipe.
MOST_OF_FLOOR, LEAST_SPEED_UP, LEAST_MEMORY = 3, 50, 20

# Runs inside the container: every case alternating, so that a busy machine disturbs all of them alike.
INSIDE = r"""
import json, os, statistics, sys, time
sys.path.insert(0, "/bench")
from google_cloud import GoogleCloud

CONFIG = json.dumps({"project": "test-project", "zone": "us-central1-c", "tpu_node_name": "tpu-a"})
RECIPE = '''
import sys
sys.path[:0] = ["/bench/packages"]
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TPUClusterResolver()
assert resolver.master() == "grpc://10.1.2.3:8470", resolver.master()
'''

def run(command, env):
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.execvpe(command[0], command, env)
    _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, command
    return time.perf_counter() - started, usage.ru_maxrss * 1024

def size(folder):
    total = 0
    for path, _, files in os.walk(folder):
        total += sum(os.lstat(os.path.join(path, name)).st_size for name in files)
    return total

with GoogleCloud() as cloud:
    plain = {"PATH": os.environ["PATH"], "LAUNCHER_LOG": "quiet"}
    node = {**plain, "TPU_CONFIG": CONFIG, "TPU_API_ENDPOINT": cloud.url, "CLOUDSDK_CONFIG": "/nonexistent",
            "TPU_API_DISCOVERY_URL": cloud.url + "/discovery/v1/apis/{api}/{apiVersion}/rest"}
    node.update(dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"), cloud.address))
    true = ["launch", "--", "/bin/true"]
    cases = {
        "floor": (["python3", "-I", "-S", "-c", "pass"], plain, FAST),
        "launch": (true, plain, FAST),
        "launch_node": (true, node, FAST),
        "recipe": ([sys.executable, "-c", RECIPE], {**node, "TF_CPP_MIN_LOG_LEVEL": "3"}, SLOW),
    }
    samples = {name: [] for name in cases}
    for name, (command, env, _) in cases.items():
        run(command, env)  # files into the page cache
    for turn in range(max(FAST, SLOW)):
        for name, (command, env, turns) in cases.items():
            if turn < turns:
                samples[name].append(run(command, env))

launcher = "/opt/trainyard/launcher"
site = next(path for path in sys.path if path.endswith("site-packages"))
found = {
    name: {"seconds": statistics.median(s for s, _ in taken), "fastest": min(s for s, _ in taken),
           "bytes": max(b for _, b in taken), "turns": len(taken)}
    for name, taken in samples.items()
}
folders = {"launcher": launcher, "tensorflow": site + "/tensorflow", "client": "/bench/packages"}
found["disk"] = {name: size(folder) for name, folder in folders.items()}
print(json.dumps(found))
"""


def _archive(packages: Path, code: str) -> bytes:
    def readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mode |= 0o555  # the image's user is not the owner
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(packages, "bench/packages", filter=readable)
        tar.add(FAKE, "bench/google_cloud.py", filter=readable)
        entry = tarfile.TarInfo("bench/inside.py")
        entry.size, entry.mode = len(code.encode()), 0o644
        tar.addfile(entry, io.BytesIO(code.encode()))
    return buffer.getvalue()


def measure(image: str, fast: int, slow: int) -> dict[str, Any]:
    """Run all cases in one container.

    Args:
        image: reference of a TensorFlow image.
        fast: samples of the cases that take milliseconds.
        slow: samples of the recipe, which takes seconds.

    Raises:
        SystemExit: the image is not here, or a case failed in it; one line says which.
    """
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--target", folder, "--python-version", "3.11"]
        subprocess.run([*install, "--only-binary", ":all:", *GOOGLE_API_CLIENT], check=True)
        code = f"FAST, SLOW = {fast}, {slow}\n{INSIDE}"
        try:
            container = docker.from_env().containers.create(
                image, entrypoint=["tini", "--", "python", "/bench/inside.py"], network_mode="none",
                labels=["benchmark"],
            )  # fmt: skip
        except docker.errors.ImageNotFound:
            sys.exit(f"no image {image} here: make image TARGET=tf-cpu")
        try:
            container.put_archive("/", _archive(Path(folder), code))
            container.start()
            if container.wait(timeout=1200)["StatusCode"]:
                sys.exit(f"the measurement failed: {container.logs().decode().strip().splitlines()[-1]}")
            found = json.loads(container.logs(stderr=False).decode().splitlines()[-1])
        finally:
            container.remove(force=True)
    assert isinstance(found, dict)
    return found


def table(found: dict[str, Any]) -> list[str]:
    """The figures for people, each with what it is compared to, and whether the targets are met."""
    names = {
        "floor": "python3 -I -S -c pass",
        "launch": "launch, nothing to resolve",
        "launch_node": "launch, TPU node resolved",
        "recipe": "import tensorflow + resolver",
    }
    lines = [f"{'':30} {'median':>10} {'fastest':>10} {'peak memory':>12} {'turns':>6}"]
    for name, title in names.items():
        case = found[name]
        lines.append(
            f"{title:30} {case['seconds'] * 1e3:7.1f} ms {case['fastest'] * 1e3:7.1f} ms"
            f" {case['bytes'] / 1e6:9.1f} MB {case['turns']:6}"
        )
    floor, launch, node, recipe = (found[name] for name in names)
    disk = found["disk"]
    checks = [
        ("launch / floor", launch["seconds"] / floor["seconds"], "at most", MOST_OF_FLOOR),
        ("recipe / launch with node, time", recipe["seconds"] / node["seconds"], "at least", LEAST_SPEED_UP),
        ("recipe / launch with node, memory", recipe["bytes"] / node["bytes"], "at least", LEAST_MEMORY),
    ]
    lines.append("")
    for title, value, relation, target in checks:
        met = value <= target if relation == "at most" else value >= target
        lines.append(f"{title:36} {value:7.1f}   target: {relation} {target:3}   {'met' if met else 'MISSED'}")
    saved = disk["tensorflow"] + disk["client"]
    lines.append(
        f"installed only to resolve a name       {saved / 1e6:7.0f} MB (tensorflow {disk['tensorflow'] / 1e6:.0f}, "
        f"API client {disk['client'] / 1e6:.0f}); the launcher: {disk['launcher'] / 1e3:.0f} kB"
    )
    return lines


def main() -> None:
    """Measure and print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("image", nargs="?", default="trainyard:tf-cpu")
    parser.add_argument("--turns", type=int, default=40, help="samples of the fast cases")
    parser.add_argument("--recipe-turns", type=int, default=5, help="samples of the recipe")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    arguments = parser.parse_args()
    found = measure(arguments.image, arguments.turns, arguments.recipe_turns)
    print(json.dumps(found) if arguments.json else "\n".join(table(found)))


if __name__ == "__main__":
    main()
