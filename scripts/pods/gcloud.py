"""gcloud's command lines for a Cloud TPU VM and for the queued resource that makes one.

Every function returns the words of one command; none runs it. Flags: ``gcloud compute tpus tpu-vm`` and
``queued-resources`` as of gcloud 528.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.pods import remote

TPU_VM = ("gcloud", "compute", "tpus", "tpu-vm")
QUEUED = ("gcloud", "compute", "tpus", "queued-resources")


@dataclass(frozen=True)
class Pod:
    """A TPU slice that is, or will be, created by name.

    Attributes:
        name: of the TPU VM, and of its queued resource if there is one.
        accelerator_type: such as ``v5litepod-16``.
        version: the TPU VM's software version, such as ``v2-alpha-tpuv5-lite``.
        spot: cheaper, and taken back when somebody else pays more.
        project: None for the one gcloud is set to.
        internal: workers have no external addresses, and ssh goes to the internal ones.
        service_account: whose rights the workers have; None for Compute Engine's default one.
        user: name to log in with; None for the local one.
    """

    name: str
    zone: str
    accelerator_type: str
    version: str
    spot: bool = False
    project: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    internal: bool = False
    service_account: str | None = None
    user: str | None = None

    @property
    def place(self) -> list[str]:
        """Flags that say where."""
        return [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]

    @property
    def _kind(self) -> list[str]:
        """Flags that say what, which both ways of creation spell alike."""
        optional = {"network": self.network, "subnetwork": self.subnetwork, "service-account": self.service_account}
        return [
            *(["--spot"] if self.spot else []),
            *(f"--{flag}={value}" for flag, value in optional.items() if value),
            *(["--internal-ips"] if self.internal else []),
        ]


def create(pod: Pod) -> list[str]:
    """Create the TPU VM, and wait until it is there or cannot be."""
    what = [f"--accelerator-type={pod.accelerator_type}", f"--version={pod.version}"]
    return [*TPU_VM, "create", pod.name, *pod.place, *what, *pod._kind]


def create_queued(pod: Pod, *, valid_until: str | None = None) -> list[str]:
    """Ask for the TPU VM in the queue; the command ends as soon as the request is in it.

    Args:
        valid_until: how long the request may wait, such as ``6h``; for ever if None.
    """
    what = [f"--node-id={pod.name}", f"--accelerator-type={pod.accelerator_type}", f"--runtime-version={pod.version}"]
    until = [f"--valid-until-duration={valid_until}"] if valid_until else []
    return [*QUEUED, "create", pod.name, *pod.place, *what, *pod._kind, *until]


def describe(pod: Pod) -> list[str]:
    """The TPU VM as JSON: state, health, addresses of the workers."""
    return [*TPU_VM, "describe", pod.name, *pod.place, "--format=json"]


def describe_queued(pod: Pod) -> list[str]:
    """The queued resource as JSON."""
    return [*QUEUED, "describe", pod.name, *pod.place, "--format=json"]


def ssh(pod: Pod, worker: int | str, command: str, *, dry_run: bool = False) -> list[str]:
    """Run a shell command on a worker.

    Args:
        worker: its number, or ``all``.
        dry_run: print one line of plain ssh for each worker instead of running them.
    """
    return [
        *TPU_VM,
        "ssh",
        f"{pod.user}@{pod.name}" if pod.user else pod.name,
        *pod.place,
        f"--worker={worker}",
        # A worker that drops packets would hold each of gcloud's ten attempts for two minutes.
        "--ssh-flag=-oConnectTimeout=10",
        *(["--internal-ip"] if pod.internal else []),
        *(["--dry-run"] if dry_run else []),
        f"--command={command}",
    ]


def run(
    pod: Pod,
    image: str,
    command: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> list[str]:
    """Start the image's container on every worker, in the background.

    Args:
        command, env, flags: as for :func:`scripts.pods.remote.start`.
    """
    steps = [remote.login(image), remote.start(image, command, env, flags)]
    return ssh(pod, "all", " && ".join(step for step in steps if step))


def logs(pod: Pod) -> list[str]:
    """Follow the containers' logs, ``[i]`` before each line; the exit status is that of a container that failed."""
    return ssh(pod, "all", remote.follow_marked())


def stop(pod: Pod) -> list[str]:
    """End the containers on every worker."""
    return ssh(pod, "all", remote.stop())


def delete(pod: Pod) -> list[str]:
    """Delete the TPU VM without asking."""
    return [*TPU_VM, "delete", pod.name, *pod.place, "--quiet"]


def delete_queued(pod: Pod) -> list[str]:
    """Delete the queued resource and the TPU VM it made, without asking."""
    return [*QUEUED, "delete", pod.name, *pod.place, "--force", "--quiet"]
