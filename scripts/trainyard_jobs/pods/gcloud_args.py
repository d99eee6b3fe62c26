"""gcloud's command lines for a Cloud TPU VM and for the queued resource that makes one.

Every function returns the arguments of one command and runs nothing. Flags: ``gcloud compute tpus tpu-vm`` and
``queued-resources`` of gcloud 528 (https://cloud.google.com/sdk/gcloud/reference/compute/tpus).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainyard_jobs.pods import shell_commands

TPU_VM = ("gcloud", "compute", "tpus", "tpu-vm")
QUEUED = ("gcloud", "compute", "tpus", "queued-resources")


@dataclass(frozen=True)
class Pod:
    """A TPU slice, which is addressed by its name and zone and may not exist yet.

    Attributes:
        name: of the TPU VM, and of its queued resource if there is one.
        accelerator_type: such as ``v5litepod-16``.
        version: the TPU VM's software version, such as ``v2-alpha-tpuv5-lite``.
        spot: a Spot VM: cheaper, and can be preempted.
        project: None for the project that gcloud is configured with.
        internal: workers have no external IP addresses, and ssh connects to the internal ones.
        service_account: account that the workers run as; None for Compute Engine's default service account.
        user: user name for ssh; None for the local user name.
        reserved: use the project's reservation.
        reservation: name of a reservation to use; queued resources only.
        flex_start: seconds that a Flex-start VM, which waits for capacity, is kept at most; queued resources only.
        slices: number of TPU VMs of one queued resource, which train together.
        labels: of the TPU VM.
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
    reserved: bool = False
    reservation: str | None = None
    flex_start: int | None = None
    slices: int = 1
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> list[str]:
        """Flags for the zone and the project."""
        return [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]

    @property
    def _kind(self) -> list[str]:
        """Flags that ``tpu-vm create`` and ``queued-resources create`` share."""
        optional = {"network": self.network, "subnetwork": self.subnetwork, "service-account": self.service_account}
        return [
            *(["--spot"] if self.spot else []),
            *(["--reserved"] if self.reserved else []),
            *([f"--labels={','.join(f'{key}={value}' for key, value in self.labels)}"] if self.labels else []),
            *(f"--{flag}={value}" for flag, value in optional.items() if value),
            *(["--internal-ips"] if self.internal else []),
        ]


def create(pod: Pod) -> list[str]:
    """Create the TPU VM; the command ends when it is created or has failed."""
    what = [f"--accelerator-type={pod.accelerator_type}", f"--version={pod.version}"]
    return [*TPU_VM, "create", pod.name, *pod.place, *what, *pod._kind]


def create_queued(pod: Pod, *, valid_until: str | None = None) -> list[str]:
    """Create a queued resource for the TPU VM; the command ends when the request is queued.

    Args:
        valid_until: how long the request may wait in the queue, such as ``6h``; None for no limit.
    """
    nodes = [f"--node-id={pod.name}"]
    if pod.slices > 1:
        nodes = [f"--node-count={pod.slices}", f"--node-prefix={pod.name}"]
    what = [*nodes, f"--accelerator-type={pod.accelerator_type}", f"--runtime-version={pod.version}"]
    until = [f"--valid-until-duration={valid_until}"] if valid_until else []
    # https://docs.cloud.google.com/tpu/docs/consume-reservation and .../request-using-flex-start
    alpha = [f"--reservation={pod.reservation}"] if pod.reservation else []
    if pod.flex_start:
        alpha += ["--provisioning-model=flex-start", f"--max-run-duration={pod.flex_start}s"]
    group = ("gcloud", "alpha", *QUEUED[1:]) if alpha else QUEUED
    return [*group, "create", pod.name, *pod.place, *what, *pod._kind, *until, *alpha]


def describe(pod: Pod, *, queued: bool = False) -> list[str]:
    """Describe the TPU VM as JSON: state, health, addresses of the workers; with ``queued``, its queued resource."""
    return [*(QUEUED if queued else TPU_VM), "describe", pod.name, *pod.place, "--format=json"]


def ssh(pod: Pod, worker: int | str, command: str, *, dry_run: bool = False) -> list[str]:
    """Run a shell command on a worker.

    Args:
        worker: its index, or ``all``.
        dry_run: print the ssh command line of each worker instead of running it.
    """
    several = pod.slices > 1
    return [
        *(QUEUED if several else TPU_VM),
        "ssh",
        f"{pod.user}@{pod.name}" if pod.user else pod.name,
        *pod.place,
        f"--worker={worker}",
        # By default, the first node, and 64 workers at a time: the others would wait until the log of these has ended.
        *(["--node=all", "--batch-size=all"] if several else []),
        # Without it, each of gcloud's ten attempts takes two minutes if a worker drops packets.
        "--ssh-flag=-oConnectTimeout=10",
        *(["--internal-ip"] if pod.internal else []),
        *(["--dry-run"] if dry_run else []),
        f"--command={command}",
    ]


def run(pod: Pod, image: str, start: str) -> list[str]:
    """Start the image's container on every worker, detached, by what :func:`shell_commands.start` returns."""
    steps = [shell_commands.login(image), start]
    return ssh(pod, "all", " && ".join(step for step in steps if step))


def logs(pod: Pod) -> list[str]:
    """Follow the containers' logs, ``[i]`` before each line; exits with the status of a container that failed."""
    return ssh(pod, "all", shell_commands.follow_marked())


def delete(pod: Pod, *, queued: bool = False) -> list[str]:
    """Delete the TPU VM without a prompt; with ``queued``, its queued resource and with it the TPU VM."""
    if queued:
        return [*QUEUED, "delete", pod.name, *pod.place, "--force", "--quiet"]
    return [*TPU_VM, "delete", pod.name, *pod.place, "--quiet"]
