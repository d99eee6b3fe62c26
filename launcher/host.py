"""TPU chips, NVIDIA GPUs and CPUs of this machine, detected from /dev, /proc and /sys. No process is started."""

from __future__ import annotations

import errno
import os
import stat

from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

GOOGLE_PCI_VENDOR = "0x1ae0"
# PCI device id -> TPU generation (R4.1)
TPU_PCI_DEVICES = {
    "0x0027": "v2 or v3",
    "0x0056": "plc",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}

# Default folders of the loader on Debian and Red Hat (R8.1); NVIDIA's container runtime mounts the driver there.
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu",
    "/usr/lib64", "/lib64", "/usr/lib",
)  # fmt: skip
# WSL 2 has the driver's libraries here, and one device for the GPUs of every vendor (R8.1).
WSL_DEVICE, WSL_LIBRARIES, WSL_DRIVERS = "dxg", "/usr/lib/wsl/lib", "/usr/lib/wsl/drivers"
CGROUPS = "/sys/fs/cgroup"


def regular(path: str, flags: int) -> int:
    """Open a regular file, as the `opener` of `open`, wherever the environment gives the path or a part of it.

    Anything else could stop the launcher: opening a FIFO waits for its other end, and some devices have no end.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file")


class Host:
    """This machine, or a copy of it below a path prefix.

    Args:
        sysroot: prefix of /dev, /proc, /sys, /opt/trainyard and folders for compiled code; "" for the machine itself.
    """

    def __init__(self, sysroot: str = "") -> None:
        self.sysroot = sysroot

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; [] if it is missing or unreadable."""
        try:
            return sorted(os.listdir(self.sysroot + folder))
        except OSError:
            return []

    def read(self, path: str) -> str:
        """The stripped text of a small file (at most 4096 bytes); "" if it is missing or unreadable."""
        try:
            with open(self.sysroot + path, "rb", opener=regular) as file:
                return file.read(4096).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def tpu_chips(self, env: Mapping[str, str]) -> list[str]:
        """Device nodes of the TPU chips, else their PCI addresses; [] without a TPU (R4.1).

        v2 to v4 use /dev/accel0..., newer generations /dev/vfio/0... Virtual machines use /dev/vfio for passed-through
        GPUs too: where an NVIDIA driver is present, only a TPU on the PCI bus makes these nodes TPU chips.
        """
        accel = [f"/dev/{name}" for name in self.names("/dev") if _numbered(name, "accel")]
        if accel:
            return accel
        pci = [
            f"{address} ({TPU_PCI_DEVICES[device]})"
            for address in self.names("/sys/bus/pci/devices")
            if self.read(f"/sys/bus/pci/devices/{address}/vendor") == GOOGLE_PCI_VENDOR
            for device in [self.read(f"/sys/bus/pci/devices/{address}/device")]
            if device in TPU_PCI_DEVICES
        ]
        vfio = [f"/dev/vfio/{name}" for name in self.names("/dev/vfio") if name.isdigit()]
        if vfio and (pci or not self.has_gpu(env)):
            return vfio
        return pci

    def has_gpu(self, env: Mapping[str, str]) -> bool:
        """Whether an NVIDIA driver is present and not hidden by NVIDIA_VISIBLE_DEVICES (R8)."""
        if text(env, "NVIDIA_VISIBLE_DEVICES") in ("void", "none"):
            return False
        if "nvidiactl" in self.names("/dev") or self.names("/proc/driver/nvidia/gpus"):
            return True
        # The device of WSL 2 is there for the GPUs of other vendors too.
        return self.has_wsl_device() and self.has_cuda_library(env)

    def has_wsl_device(self) -> bool:
        """Whether this is WSL 2 with a GPU: /dev/dxg stands for all GPUs of the Windows host (R8.1)."""
        return WSL_DEVICE in self.names("/dev")

    def has_cuda_library(self, env: Mapping[str, str]) -> bool:
        """Return whether the dynamic loader finds the driver's libcuda.so.1, which CUDA programs load (R8.1)."""
        return bool(self.cuda_library(env))

    def cuda_library(self, env: Mapping[str, str]) -> str:
        """Return the path of libcuda.so.1 below the sysroot, in the order of the dynamic loader; "" without one (R8.1).

        GKE and Vertex AI mount the driver under /usr/local/nvidia; NVIDIA's container runtime mounts it into the
        distribution's library folder, or on WSL 2 into the folder of the Windows driver.
        """
        folders = [*text(env, "LD_LIBRARY_PATH").split(":"), *LIBRARY_FOLDERS, WSL_LIBRARIES]
        for folder in folders:
            if folder and "libcuda.so.1" in self.names(folder):
                return f"{folder}/libcuda.so.1"
        for folder in self.names(WSL_DRIVERS):
            for name in self.names(f"{WSL_DRIVERS}/{folder}"):
                if name.startswith("libcuda.so.1"):
                    return f"{WSL_DRIVERS}/{folder}/{name}"
        return ""

    def gpu_count(self, env: Mapping[str, str]) -> int:
        """Number of GPUs that a process sees: device nodes, limited by CUDA_VISIBLE_DEVICES (R8.2)."""
        if not self.has_gpu(env):
            return 0
        nodes = [name for name in self.names("/dev") if _numbered(name, "nvidia")]
        # WSL 2 has one device for all GPUs.
        present = len(nodes) or len(self.names("/proc/driver/nvidia/gpus")) or int(self.has_wsl_device())
        if "CUDA_VISIBLE_DEVICES" not in env:
            return present
        chosen = 0
        for word in env["CUDA_VISIBLE_DEVICES"].split(","):
            if not word.strip() or word.strip().startswith("-"):
                break  # CUDA ignores the first invalid entry and all after it
            chosen += 1
        return min(chosen, present)

    def folders(self, *paths: str) -> list[str]:
        """Return those of the paths that are folders."""
        return [path for path in paths if path and os.path.isdir(self.sysroot + path)]

    def loads_code(self, folder: str) -> bool:
        """Return whether this process may write to a folder, and load shared libraries from there (R10.6)."""
        try:
            noexec = os.statvfs(self.sysroot + folder).f_flag & os.ST_NOEXEC
        except (AttributeError, OSError):  # ST_NOEXEC is Linux's
            noexec = 0
        return not noexec and os.access(self.sysroot + folder, os.W_OK | os.X_OK)

    def affinity(self) -> int:
        """Number of CPUs that this process may run on: its affinity mask, which a cpuset limits too.

        The mask is a list such as ``0-3,8`` in proc_pid_status(5).
        """
        status = self.read("/proc/self/status")
        try:
            listed = status.split("Cpus_allowed_list:")[1].split(maxsplit=1)[0]
            ranges = [part.split("-") for part in listed.split(",")]
            return max(1, sum(int(numbers[-1]) - int(numbers[0]) + 1 for numbers in ranges))
        except (IndexError, ValueError):  # not on macOS
            return os.cpu_count() or 1

    def cpu_quota(self) -> float:
        """CPUs that the quotas of this process's cgroup and of those above it allow; 0.0 without a quota (R14.5).

        A container sees its own cgroup as the root of /sys/fs/cgroup. Without a cgroup namespace /proc/self/cgroup has
        the path on the host, so each part of the path is tried.
        """
        limits = []
        for line in self.read("/proc/self/cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers and "cpu" not in controllers.split(","):
                continue
            roots = [CGROUPS] if not controllers else [f"{CGROUPS}/{controllers}", f"{CGROUPS}/cpu"]
            for folder in _with_parents(path):
                limits += [self._quota(root + folder, version_2=not controllers) for root in roots]
        return min((limit for limit in limits if limit), default=0.0)

    def memory(self) -> int:
        """Return the bytes of memory that this process may use: what is available, or its container's limit if less."""
        found = [1 << 60]
        for line in self.read("/proc/meminfo").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                found.append(int(value.split()[0]) << 10)
        for path in (f"{CGROUPS}/memory.max", f"{CGROUPS}/memory/memory.limit_in_bytes"):
            word = self.read(path)
            if word.isascii() and word.isdigit() and len(word) < 20:  # "max" without a limit
                found.append(int(word))
        return min(found)

    def _quota(self, folder: str, version_2: bool) -> float:
        if version_2:  # "150000 100000" or "max 100000"
            quota, _, period = self.read(f"{folder}/cpu.max").partition(" ")
        else:  # the quota is -1 without a limit
            quota, period = self.read(f"{folder}/cpu.cfs_quota_us"), self.read(f"{folder}/cpu.cfs_period_us")
        if not all(word.isascii() and word.isdigit() and len(word) < 16 for word in (quota, period)) or not int(period):
            return 0.0
        return int(quota) / int(period)


def _with_parents(path: str) -> list[str]:
    """A path and those above it: "/a/b", "/a" and "". At most 32 of them, and none that leaves the folder."""
    parts = [part for part in path.split("/") if part and part != ".."][:32]
    return ["".join(f"/{part}" for part in parts[:end]) for end in range(len(parts), -1, -1)]


def _numbered(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].isdigit()
