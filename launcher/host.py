"""TPU chips and NVIDIA GPUs of this machine, detected from /dev, /proc and /sys. No process is started."""

from __future__ import annotations

import os

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
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib")


class Host:
    """This machine, or a copy of it below a path prefix.

    Args:
        sysroot: prefix of /dev, /proc, /sys and /opt/trainyard; "" for the machine itself.
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
            with open(self.sysroot + path, "rb") as file:
                return file.read(4096).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def tpu_chips(self) -> list[str]:
        """Device nodes of the TPU chips, else their PCI addresses; [] without a TPU (R4.1).

        v2 to v4 use /dev/accel0..., newer generations /dev/vfio/0...
        """
        accel = [f"/dev/{name}" for name in self.names("/dev") if _numbered(name, "accel")]
        if accel:
            return accel
        vfio = [f"/dev/vfio/{name}" for name in self.names("/dev/vfio") if name.isdigit()]
        if vfio:
            return vfio
        return [
            f"{address} ({TPU_PCI_DEVICES[device]})"
            for address in self.names("/sys/bus/pci/devices")
            if self.read(f"/sys/bus/pci/devices/{address}/vendor") == GOOGLE_PCI_VENDOR
            for device in [self.read(f"/sys/bus/pci/devices/{address}/device")]
            if device in TPU_PCI_DEVICES
        ]

    def has_gpu(self, env: Mapping[str, str]) -> bool:
        """Whether an NVIDIA driver is present and not hidden by NVIDIA_VISIBLE_DEVICES (R8)."""
        if text(env, "NVIDIA_VISIBLE_DEVICES") in ("void", "none"):
            return False
        return "nvidiactl" in self.names("/dev") or bool(self.names("/proc/driver/nvidia/gpus"))

    def has_cuda_library(self, env: Mapping[str, str]) -> bool:
        """Whether the dynamic loader finds the driver's libcuda.so.1, which CUDA programs load (R8.1).

        GKE and Vertex AI mount the driver under /usr/local/nvidia; NVIDIA's container runtime mounts it into the
        distribution's library folder.
        """
        folders = [*text(env, "LD_LIBRARY_PATH").split(":"), *LIBRARY_FOLDERS]
        return any("libcuda.so.1" in self.names(folder) for folder in folders if folder)

    def gpu_count(self, env: Mapping[str, str]) -> int:
        """Number of GPUs that a process sees: device nodes, limited by CUDA_VISIBLE_DEVICES (R8.2)."""
        if not self.has_gpu(env):
            return 0
        nodes = [name for name in self.names("/dev") if _numbered(name, "nvidia")]
        present = len(nodes) or len(self.names("/proc/driver/nvidia/gpus"))
        if "CUDA_VISIBLE_DEVICES" not in env:
            return present
        chosen = 0
        for word in env["CUDA_VISIBLE_DEVICES"].split(","):
            if not word.strip() or word.strip().startswith("-"):
                break  # CUDA ignores the first invalid entry and all after it
            chosen += 1
        return min(chosen, present)


def _numbered(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].isdigit()
