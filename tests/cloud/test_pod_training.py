"""A trainer on a pod of two workers that is preempted: it resumes from its checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from tests.cloud.test_pod import QUICK, SLICE, Start, cloud, home, nothing_left, start, volume
from tests.fakes.tpu_vms import TpuVms

pytestmark = [pytest.mark.concurrent, pytest.mark.needs("gcloud")]

__all__ = ["cloud", "home", "start", "volume"]  # fixtures


@pytest.mark.slow("test_pod.py, test_rehearse.py")
def test_mnist_resumes_from_its_checkpoint_after_a_preemption(
    cloud: TpuVms, start: Start, volume: str, built_image: Callable[[str], str]
) -> None:
    image = built_image("tf-cpu")
    # On CPUs instead of TPUs, with a volume instead of a bucket: one folder per worker, since each trains alone.
    folder = "/bucket/$(hostname | sed s/.*-//)"
    script = f"exec launch mnist --fake-data --fake-images=12800 --epochs=4 --checkpoint-dir={folder}"
    running = start(
        "--name=mnist", *SLICE, "--spot", f"--image={image}", *QUICK, f"--flags=-v {volume}:/bucket --user root",
        "--env=LAUNCHER_REHEARSE=1 OMP_NUM_THREADS=1", f"--command=sh -c '{script}'",
    )  # fmt: skip
    for index in range(2):
        running.until(rf"\[{index}\] Epoch 2 train begin", seconds=600)
    cloud.preempt("mnist")
    assert running.end(600) == 0, running.text
    assert "mnist was preempted: creating it again (1 of 50)" in running.text
    for index in range(2):
        lines = re.findall(rf"\[{index}\] (.*)", running.text)
        summary = json.loads(next(line for line in reversed(lines) if '"event": "summary"' in line))
        assert (summary["status"], summary["global_step"]) == ("completed", 800)
        assert summary["resumed_from"] >= 200, "resumed from before the checkpoint of the first epoch"
    assert nothing_left(cloud, "mnist")
