"""The launcher's settings: every LAUNCHER_* variable and every option, read and checked in one place."""

from __future__ import annotations

from launcher.errors import RETRYABLE, UNFIT, config_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

NEEDS = ("memory", "shm", "disk", "files", "gpus")
RUNTIMES = ("cpu", "gpu", "tpu-local", "tpu-node")

# variable -> (default, description). Printed by `launch --help`.
VARIABLES = {
    "LAUNCHER_RUNTIME": ("", "runtime to use instead of detecting it: cpu, gpu, tpu-local or tpu-node (R0)"),
    "LAUNCHER_FRAMEWORK": ("", "name==version of the framework, instead of that in /opt/trainyard/recipe.json"),
    "LAUNCHER_REHEARSE": ("", "1: detect and export as on the platform, then train on the CPU"),
    "LAUNCHER_TPU_PROJECT": ("", "project of the TPU node; overrides TPU_CONFIG and the metadata server"),
    "LAUNCHER_TPU_ZONE": ("", "zone of the TPU node; overrides TPU_CONFIG and the metadata server"),
    "LAUNCHER_TPU_ATTEMPTS": ("40", "maximum number of requests for a TPU node"),
    "LAUNCHER_TPU_INTERVAL": ("10", "seconds between two attempts"),
    "LAUNCHER_TPU_404_ATTEMPTS": ("", "maximum number of attempts that return HTTP 404 (default: all attempts)"),
    "LAUNCHER_REQUIRE_HEALTHY": ("", "1: also wait until the node is HEALTHY (attempts 30 s apart, 1200 s in all)"),
    "LAUNCHER_HTTP_TIMEOUT": ("10", "time limit of one request in seconds, from connect to last byte"),
    "LAUNCHER_RETRYABLE_EXIT": (str(RETRYABLE), "exit status of a retryable failure"),
    "LAUNCHER_PREFLIGHT": ("", "1: test all nodes before the command, and exit with 75 if one is not fit"),
    "LAUNCHER_PREFLIGHT_NEEDS": ("", "what a node must have: memory=64,shm=8,disk=100 in GiB; files=4096,gpus=8"),
    "LAUNCHER_PREFLIGHT_WAIT": ("300", "seconds that the nodes of a preflight wait for each other"),
    "LAUNCHER_NPROC": ("", "processes that the launcher starts on this node (default: one per GPU)"),
    "LAUNCHER_PREFIX": ("", "1: with several processes per node, start each line of their output with [rank N]"),
    "LAUNCHER_LOG_DIR": (
        "",
        "folder for the output and the errors of each process: attempt_N/RANK/stdout.log and so on",
    ),
    "LAUNCHER_MASTER_ADDR": ("", "address of node 0; overrides the platform's"),
    "LAUNCHER_MASTER_PORT": ("", "port of node 0; overrides the platform's"),
    "LAUNCHER_RDZV_BACKEND": ("static", "c10d: start the processes with torchrun and this rendezvous backend"),
    "LAUNCHER_DNS_TIMEOUT": ("300", "seconds to wait until the name of node 0 resolves"),
    "LAUNCHER_JAX_TIMEOUT": (
        "",
        "seconds to wait for JAX's coordinator on node 0 (default: 300 for Trainyard's, else 0)",
    ),
    "LAUNCHER_SIGNAL_GROUP": ("", "1: send signals to the trainer's whole process group, and wait for all of it"),
    "LAUNCHER_GRACE": ("10", "seconds until SIGKILL for the other processes of a node after one has failed"),
    "LAUNCHER_MIRROR_GCS": ("", "1: export AIP_* gs:// folders also as LAUNCHER_GCS_AIP_*=/gcs/..."),
    "LAUNCHER_LOG": ("normal", "quiet: warnings and errors; normal: also the result; explain: also every signal"),
    "LAUNCHER_SYSROOT": ("", "path prefix of /dev, /proc, /sys and /opt/trainyard"),
}


def text(env: Mapping[str, str], name: str) -> str:
    """The value of a variable without surrounding blanks; "" if unset. Empty means unset everywhere (R10.1)."""
    return env.get(name, "").strip()


def flag(env: Mapping[str, str], name: str) -> bool:
    """A boolean setting. Raises LaunchError (2) if the value is not a boolean."""
    word = text(env, name).lower()
    if word in ("", "0", "false", "no", "off"):
        return False
    if word in ("1", "true", "yes", "on"):
        return True
    raise config_error(f"{name} is {word[:40]!r}: use 1 or 0")


def integer(name: str, word: str, low: int, high: int) -> int:
    """A whole number in [low, high]. Raises LaunchError (2) naming the variable."""
    digits = word[1:] if word[:1] == "-" else word
    if digits.isascii() and digits.isdigit() and len(digits) < 10 and low <= int(word) <= high:
        return int(word)
    raise config_error(f"{name} is {word[:40]!r}: it must be a whole number from {low} to {high}")


def seconds(name: str, word: str, high: float) -> float:
    """A duration in seconds in [0, high]. Raises LaunchError (2) naming the variable."""
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if 0 <= value <= high:  # false for NaN
        return value
    raise config_error(f"{name} is {word[:40]!r}: it must be a number of seconds from 0 to {high:g}")


def choice(name: str, word: str, choices: tuple[str, ...]) -> str:
    """One of `choices`. Raises LaunchError (2) listing them."""
    if word in choices:
        return word
    raise config_error(f"{name} is {word[:40]!r}: it must be one of {', '.join(choices)}")


def needs(name: str, word: str) -> dict[str, int]:
    """Return what `memory=64,gpus=8` asks for. Raises LaunchError (2) naming the variable."""
    found = {}
    for part in word.split(",") if word else []:
        key, _, value = part.partition("=")
        found[choice(name, key.strip(), NEEDS)] = integer(name, value.strip(), 0, 1 << 20)
    return found


class Settings:
    """The launcher's settings, validated. Options take precedence over variables (R10.2).

    Args:
        env: the environment.
        flags: setting -> value, from the command line.

    Raises:
        LaunchError: (2) for an invalid value.
    """

    def __init__(self, env: Mapping[str, str], flags: Mapping[str, str] | None = None) -> None:
        flags = flags or {}

        def value(name: str) -> str:
            return flags.get(name) or text(env, name) or VARIABLES[name][0]

        def switch(name: str) -> bool:
            return name in flags or flag(env, name)

        self.force = "force" in flags
        self.runtime = value("LAUNCHER_RUNTIME")
        if self.runtime:
            choice("LAUNCHER_RUNTIME", self.runtime, RUNTIMES)
        self.rehearse = switch("LAUNCHER_REHEARSE")
        self.project = value("LAUNCHER_TPU_PROJECT")
        self.zone = value("LAUNCHER_TPU_ZONE")
        self.require_healthy = switch("LAUNCHER_REQUIRE_HEALTHY")
        # 40 attempts 10 s apart: the loop that Google documented (R12.2). 30 s and 1200 s: wait_for_healthy of
        # TensorFlow's client (R12.3).
        paced = self.require_healthy and not text(env, "LAUNCHER_TPU_INTERVAL")
        self.interval = seconds("LAUNCHER_TPU_INTERVAL", "30" if paced else value("LAUNCHER_TPU_INTERVAL"), 3600)
        self.attempts = integer(
            "LAUNCHER_TPU_ATTEMPTS",
            "41" if paced and not text(env, "LAUNCHER_TPU_ATTEMPTS") else value("LAUNCHER_TPU_ATTEMPTS"),
            1,
            100000,
        )
        self.not_found_attempts = integer(
            "LAUNCHER_TPU_404_ATTEMPTS", value("LAUNCHER_TPU_404_ATTEMPTS") or str(self.attempts), 1, 100000
        )
        self.http_timeout = seconds("LAUNCHER_HTTP_TIMEOUT", value("LAUNCHER_HTTP_TIMEOUT"), 600)
        self.retryable_exit = integer("LAUNCHER_RETRYABLE_EXIT", value("LAUNCHER_RETRYABLE_EXIT"), 1, 255)
        self.unfit_exit = self.retryable_exit if text(env, "LAUNCHER_RETRYABLE_EXIT") else UNFIT
        self.preflight = switch("LAUNCHER_PREFLIGHT")
        self.needs = needs("LAUNCHER_PREFLIGHT_NEEDS", value("LAUNCHER_PREFLIGHT_NEEDS"))
        self.preflight_wait = seconds("LAUNCHER_PREFLIGHT_WAIT", value("LAUNCHER_PREFLIGHT_WAIT"), 86400)
        nproc = value("LAUNCHER_NPROC")
        self.nproc = integer("LAUNCHER_NPROC", nproc, 1, 1024) if nproc else 0
        self.master_addr = value("LAUNCHER_MASTER_ADDR")
        port = value("LAUNCHER_MASTER_PORT")
        self.master_port = integer("LAUNCHER_MASTER_PORT", port, 1, 65535) if port else 0
        self.rdzv_backend = choice("LAUNCHER_RDZV_BACKEND", value("LAUNCHER_RDZV_BACKEND"), ("static", "c10d"))
        self.dns_timeout = seconds("LAUNCHER_DNS_TIMEOUT", value("LAUNCHER_DNS_TIMEOUT"), 86400)
        wait = value("LAUNCHER_JAX_TIMEOUT")
        self.coordinator_timeout = seconds("LAUNCHER_JAX_TIMEOUT", wait, 86400) if wait else None
        self.signal_group = switch("LAUNCHER_SIGNAL_GROUP")
        self.prefix = switch("LAUNCHER_PREFIX")
        self.log_dir = value("LAUNCHER_LOG_DIR").rstrip("/")
        if "://" in self.log_dir:
            raise config_error(f"LAUNCHER_LOG_DIR is {self.log_dir[:80]!r}: it must be a folder of this machine")
        self.grace = seconds("LAUNCHER_GRACE", value("LAUNCHER_GRACE"), 3600)
        self.mirror_gcs = switch("LAUNCHER_MIRROR_GCS")
        self.log = choice("LAUNCHER_LOG", value("LAUNCHER_LOG"), ("quiet", "normal", "explain"))
        self.sysroot = text(env, "LAUNCHER_SYSROOT").rstrip("/")
        self.metadata_host = text(env, "GCE_METADATA_HOST")
        self.tpu_api = text(env, "TPU_API_ENDPOINT") or "https://tpu.googleapis.com"
