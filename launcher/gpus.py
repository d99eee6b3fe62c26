"""Compare the NVIDIA driver and the visible GPUs with what the image has code for (R8.3 to R8.5).

Imported only where the runtime is `gpu`, an NVIDIA driver is present, and the recipe says what the image needs.
"""

from __future__ import annotations

from launcher.errors import config_error
from launcher.image import is_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from launcher.host import Host
    from launcher.image import Image

VERSION_FILE = "/proc/driver/nvidia/version"
GPU_FOLDER = "/proc/driver/nvidia/gpus"
LIBRARY = "libcuda.so.1"
# Without persistence mode cuInit initializes each GPU, which takes 1 to 3 s, and machines have up to 16 (R8.3).
DEADLINE = 60.0  # seconds
KILL_DEADLINE = 1.0  # seconds until a killed process is left alone: one that waits inside the kernel does not end

# Runs in a child process. It prints a line after each step, so that a driver that hangs or crashes has said what it
# could. cuDriverGetVersion needs no cuInit. 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
ASK = """
import ctypes, json, sys

def say(**answer):
    print(json.dumps(answer), flush=True)

def number(name, *arguments):
    value = ctypes.c_int(-1)
    return -1 if getattr(cuda, name)(ctypes.byref(value), *arguments) else value.value

try:
    cuda = ctypes.CDLL(sys.argv[1])
except OSError as error:
    say(missing=str(error))
    sys.exit()
say(cuda=max(0, number("cuDriverGetVersion")))
error = cuda.cuInit(0)
say(error=error)
gpus = []
for index in range(0 if error else number("cuDeviceGetCount")):
    device = number("cuDeviceGet", index)
    major, minor = (number("cuDeviceGetAttribute", attribute, device) for attribute in (75, 76))
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    gpus.append([name.value.decode("utf-8", "replace"), "" if -1 in (major, minor) else "%d.%d" % (major, minor)])
say(gpus=gpus)
"""

# Error of cuInit -> what it means and what to do. Names and numbers are those of CUresult (R8.3).
MISMATCH, NO_COMPATIBILITY = 803, 804
ERRORS = {
    34: "the library is the stub of the CUDA toolkit: remove its folder from LD_LIBRARY_PATH",
    100: "the driver shows no GPU to this container: request one, or run 'nvidia-smi' on the host; the newest drivers "
    "do not know the oldest GPUs",
    802: "the system is not ready: a host with NVSwitch needs nvidia-fabricmanager",
    MISMATCH: "the library and the kernel module are of different drivers: restart the host after an update of its "
    "driver, and remove a cuda-compat package that does not fit it from LD_LIBRARY_PATH",
    NO_COMPATIBILITY: "the library is that of a cuda-compat package, which this GPU or its driver does not support: "
    "remove its folder from LD_LIBRARY_PATH",
    805: "the MPS daemon does not answer: start nvidia-cuda-mps-control, or unset CUDA_MPS_PIPE_DIRECTORY",
    999: "unknown error: run 'nvidia-smi' on the host, and load its module nvidia-uvm",
}

WAY_ROUND = "LAUNCHER_RUNTIME=cpu starts without this check"


class Gpu:
    """Describe a GPU that CUDA shows to this process.

    Attributes:
        index: its number among the visible ones.
        name: model; for a MIG device, with its profile.
        capability: compute capability; "" if unknown.
        code: how the image runs on it: "machine code", "PTX", "none", or "unknown".
    """

    __slots__ = ("capability", "code", "index", "name")

    def __init__(self, index: int, name: str, capability: str, code: str) -> None:
        self.index = index
        self.name = name
        self.capability = capability
        self.code = code


class Driver:
    """Hold the answer of the NVIDIA driver.

    Attributes:
        version: version of the kernel module, such as 580.65.06; "" if unknown.
        cuda: newest CUDA that the loaded libcuda.so.1 has, such as 13.0; "" if unknown.
        error: error of cuInit; 0 if there was none, None if it was not called or did not return.
        gpus: the visible GPUs.
        missing: why libcuda.so.1 cannot be loaded; "" if it can be, or there is none.
        problem: why there is no complete answer; "" if there is one.
    """

    __slots__ = ("cuda", "error", "gpus", "missing", "problem", "version")

    def __init__(self, version: str) -> None:
        self.version = version
        self.cuda = ""
        self.error: int | None = None
        self.gpus: list[Gpu] = []
        self.missing = ""
        self.problem = ""

    @property
    def text(self) -> str:
        """Return the versions for people."""
        words = [f"driver {self.version}"] if self.version else []
        return ", ".join(words + ([f"CUDA {self.cuda}"] if self.cuda else [])) or "driver of unknown version"


def hidden(env: Mapping[str, str], host: Host) -> bool:
    """Return whether the user has hidden every GPU: CUDA_VISIBLE_DEVICES is empty or starts with -1 (R8.2)."""
    return "CUDA_VISIBLE_DEVICES" in env and not host.gpu_count(env)


def driver_version(host: Host) -> str:
    """Return the version of the kernel module from /proc; "" if it is not there.

    The proprietary module writes `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ...`, the open one
    `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ...`.
    """
    _, _, rest = host.read(VERSION_FILE).partition("Kernel Module")
    return next((word for word in rest.split()[:4] if is_version(word)), "")


def numbers(version: str) -> tuple[int, ...]:
    """Return the parts of a version of digits and dots, such as 580.65.06 or 9.0."""
    return tuple(int(part) for part in version.split("."))


def code_for(capability: str, gpus: str) -> str:
    """Return how the image runs on a compute capability: "machine code", "PTX", "none", or "unknown" (R8.5).

    Args:
        capability: such as 8.6; "" if unknown.
        gpus: capabilities of the image, such as `8.0 9.0+PTX`.
    """
    if not capability:
        return "unknown"
    wanted = numbers(capability)
    words = [(numbers(word.partition("+")[0]), word.endswith("+PTX")) for word in gpus.split()]
    if any(code[0] == wanted[0] and code <= wanted for code, _ in words):
        return "machine code"
    return "PTX" if any(ptx and code <= wanted for code, ptx in words) else "none"


def ask(host: Host, env: Mapping[str, str], image: Image) -> Driver:
    """Ask the driver for its version, and CUDA for the GPUs that it shows to programs of this environment (R8.3).

    libcuda.so.1 is loaded in a child process, where a driver that hangs or crashes does no harm.
    """
    driver = Driver(driver_version(host))
    path = host.cuda_library(env)
    # Frameworks load it by its name. Without a path the loader may still find it, but not below a sysroot.
    if path or not host.sysroot:
        _read(driver, _answer(driver, env, image, host.sysroot + path if host.sysroot else LIBRARY), image)
    if not path:
        driver.missing = ""  # a warning of R8.1
    if not driver.gpus:  # their models, without capabilities
        models = [_model(host.read(f"{GPU_FOLDER}/{name}/information")) for name in host.names(GPU_FOLDER)]
        driver.gpus = [Gpu(index, model, "", "unknown") for index, model in enumerate(models) if model]
    return driver


def _model(information: str) -> str:
    """Return the model of a GPU from its file in /proc, whose first line is `Model: \\t\\t Tesla T4`."""
    lines = [line.partition(":") for line in information.splitlines()]
    return next((value.strip() for name, _, value in lines if name == "Model"), "")


def _answer(driver: Driver, env: Mapping[str, str], image: Image, library: str) -> dict[str, Any]:
    """Return what the child process prints, as one object; sets the driver's problem if that is not everything."""
    import contextlib
    import json
    import subprocess
    import sys

    command = [sys.executable or image.python(), "-I", "-S", "-c", ASK, library]
    pipe = subprocess.PIPE
    out = b""
    try:
        child = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        try:
            out, err = child.communicate(timeout=DEADLINE)
            if child.returncode:
                ended = [f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"]
                reason = (err.decode("utf-8", "replace").strip().splitlines() or ended)[-1]
                driver.problem = f"the NVIDIA driver cannot be asked ({LIBRARY}: {reason[:200]})"
        except subprocess.TimeoutExpired as late:
            out = late.output or b""
            driver.problem = (
                f"the NVIDIA driver did not answer within {DEADLINE:g} s (cuInit of {LIBRARY}), and CUDA programs may "
                "hang: run 'nvidia-smi' on the host, and look for Xid errors in its kernel log"
            )
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=KILL_DEADLINE)
    except (OSError, ValueError) as error:
        driver.problem = f"the NVIDIA driver cannot be asked ({type(error).__name__}: {error})"
    answer: dict[str, Any] = {}
    for line in out.decode("utf-8", "replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):  # the library may print, too
            answer.update(said)
    return answer


def _read(driver: Driver, answer: dict[str, Any], image: Image) -> None:
    """Set the attributes of the driver from what the child process printed."""
    driver.missing = answer.get("missing", "")
    cuda = answer.get("cuda", 0)  # 13020 is 13.2
    driver.cuda = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    driver.error = answer.get("error")
    if driver.error == 0 and answer.get("gpus") == []:
        driver.error = 100  # as cuInit without a GPU
    for index, (name, capability) in enumerate(answer.get("gpus", [])):
        driver.gpus.append(Gpu(index, name, capability, code_for(capability, image.gpus)))


def too_old(driver: Driver, image: Image) -> bool:
    """Return whether the driver is certainly older than the image needs (R8.4).

    A started libcuda.so.1 decides, because a cuda-compat package brings a newer CUDA to an older kernel module. Else
    the kernel module does, unless such a package is loaded and did not start for a reason that may pass.
    """
    enough = bool(driver.cuda) and numbers(driver.cuda)[0] >= numbers(image.cuda)[0]
    if driver.error == 0 and driver.cuda:
        return not enough
    if enough and driver.error not in (MISMATCH, NO_COMPATIBILITY):
        return False
    return bool(driver.version) and numbers(driver.version) < numbers(image.driver)


def judge(driver: Driver, image: Image, env: Mapping[str, str], trains: bool) -> list[str]:
    """Refuse a driver and GPUs that the image cannot train on; return warnings of what may fail (R8.3 to R8.5).

    Args:
        driver: its answer.
        image: what it needs.
        env: CUDA_VISIBLE_DEVICES.
        trains: the command trains on the GPU. If not, a refusal is a warning.

    Raises:
        LaunchError: (2) if the driver is too old, or the image has code for none of the visible GPUs.
    """
    warnings = []
    refusal = ""
    unfit = [gpu for gpu in driver.gpus if gpu.code == "none"]
    if too_old(driver, image):
        refusal = _driver_refusal(driver, image, unfit)
    elif unfit and len(unfit) == len(driver.gpus):
        refusal = (
            f"this image has no code for the GPU of this machine: {_listed(unfit)} ({driver.text}); {_content(image)} "
            f"has code for {image.gpus}: use another GPU, or {_other_image(image, unfit)} (docs/gpus.md); {WAY_ROUND}"
        )
    elif unfit:
        warnings.append(
            f"this image has no code for {_listed(unfit)}, only for {image.gpus}: processes on that GPU will fail; "
            f"{_leave_out(env, driver)}"
        )
    if refusal and trains:
        raise config_error(refusal)
    if refusal:
        warnings.append(refusal)
    return warnings + _doubts(driver, image)


def _doubts(driver: Driver, image: Image) -> list[str]:
    """Return a line for each cause that may keep CUDA from starting, or code from running."""
    warnings = [driver.problem] if driver.problem else []
    if driver.missing:
        warnings.append(f"{LIBRARY} cannot be loaded, and CUDA will not start: {driver.missing[:200]}")
    if driver.error:
        meaning = ERRORS.get(driver.error, "see CUresult in the documentation of the CUDA driver API")
        warnings.append(f"CUDA does not start, cuInit of {LIBRARY} returned {driver.error} ({driver.text}): {meaning}")
    ptx = [gpu for gpu in driver.gpus if gpu.code == "PTX"]
    if ptx and driver.cuda and numbers(driver.cuda) < numbers(image.cuda):
        warnings.append(
            f"{_listed(ptx)} runs this image from PTX only, and a driver with CUDA {driver.cuda} may not compile that "
            f"of CUDA {image.cuda} (cudaErrorUnsupportedPtxVersion): update the host's driver"
        )
    return warnings


def _driver_refusal(driver: Driver, image: Image, unfit: list[Gpu]) -> str:
    """Return the line for a driver that is too old."""
    remedy = "update the host's driver, or use an image with an older CUDA"
    if unfit and len(unfit) == len(driver.gpus):  # a newer driver would not help
        remedy = f"use {_other_image(image, unfit)}"
    reason = f"; {ERRORS[driver.error]}" if driver.error in (MISMATCH, NO_COMPATIBILITY) else ""
    where = f" for {_listed(driver.gpus)}" if driver.gpus else ""
    return (
        f"the NVIDIA driver of this machine is too old for this image: {driver.text}{where}; {_content(image)} needs "
        f"driver {image.driver} or later{reason}: {remedy} (docs/gpus.md); {WAY_ROUND}"
    )


def _content(image: Image) -> str:
    """Return the image for people, such as `gpu (torch 2.15.0, CUDA 13.2)`."""
    return f"{image.name} ({image.framework} {image.version}, CUDA {image.cuda})"


def _other_image(image: Image, unfit: list[Gpu]) -> str:
    """Return the remedy for GPUs that the image has no code for."""
    wanted = " and ".join(dict.fromkeys(gpu.capability for gpu in unfit))
    return f"an image whose {image.framework} has code for {wanted}"


def _listed(gpus: list[Gpu]) -> str:
    """Return GPUs for people, those of one model together: `GPU 0, 1 (Tesla T4, compute capability 7.5)`."""
    models: dict[str, list[str]] = {}
    for gpu in gpus:
        capability = f", compute capability {gpu.capability}" if gpu.capability else ""
        models.setdefault(f"({gpu.name}{capability})", []).append(str(gpu.index))
    return " and ".join(f"GPU {', '.join(indexes)} {model}" for model, indexes in models.items())


def _leave_out(env: Mapping[str, str], driver: Driver) -> str:
    """Return how to use only the GPUs that the image has code for; CUDA numbers those of CUDA_VISIBLE_DEVICES anew."""
    given = env.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu.index) for gpu in driver.gpus] if given is None else given.split(",")
    fit = [gpu.index for gpu in driver.gpus if gpu.code != "none" and gpu.index < len(names)]
    return f"set CUDA_VISIBLE_DEVICES={','.join(names[index].strip() for index in fit)} to use the others only"


def lines(driver: Driver, image: Image) -> list[str]:
    """Return the lines of `--explain`: the versions, and each GPU."""
    result = [
        f"nvidia    {driver.text}; the image has CUDA {image.cuda}, needs driver {image.driver} or later, and has code "
        f"for {image.gpus}"
    ]
    runs = {
        "machine code": "runs",
        "PTX": "runs from PTX, which the driver compiles",
        "none": "no code in this image",
        "unknown": "not checked",
    }
    for gpu in driver.gpus:
        capability = f"compute capability {gpu.capability or 'unknown'}"
        result.append(f"gpu       {gpu.index}: {gpu.name}, {capability}: {runs[gpu.code]}")
    return result
