"""The PyTorch trainers against what people write by hand, in the same process environment, on the same data and cores.

    python -m benchmarks.trainers mnist DIGITS      seconds of training to 98.5 %, ours and the classic recipe
    python -m benchmarks.trainers pipeline FOLDER   images per second: decoding alone, ours, torchvision's ImageFolder

DIGITS is written by ``python -m scripts.digits``, FOLDER holds class folders of JPEG files. Run it where torch is (an
image, with the checkout mounted and PYTHONPATH set); ``--device cuda`` for the first. The result is JSON on stdout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TARGET = 98.5  # percent


def ours_to_target(datadir: str, device: str, seed: int) -> dict[str, Any]:
    """Seconds that ``trainers.torch.mnist`` trains until a test reaches the target."""
    words = ["--datadir", datadir, "--epochs=10", f"--target-accuracy={TARGET}", f"--device={device}", f"--seed={seed}"]
    command = [sys.executable, "-m", "trainers.torch.mnist", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(ended.stdout.splitlines()[-1])
    return {"seconds": summary["train_seconds"], "accuracy": summary["accuracy"], "epochs": summary["epochs"]}


def classic_to_target(datadir: str, device: str, seed: int, most_epochs: int = 60) -> dict[str, Any]:
    """The same for the recipe of pytorch/examples, written from its description: two 3x3 convolutions of 32 and 64
    filters, dropout, Adadelta with rate 1 times 0.7 an epoch, batches of 64 from a DataLoader over PIL images."""
    import torch
    import torch.nn.functional as F
    from PIL import Image
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from trainers.common import idx

    class Digits(Dataset[tuple[torch.Tensor, int]]):
        def __init__(self, split: str) -> None:
            self.images, self.labels = idx.load_mnist(datadir, split)

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            pixels = torch.from_numpy(np.array(Image.fromarray(self.images[index]))).float() / 255
            return ((pixels - 0.1307) / 0.3081)[None], int(self.labels[index])

    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    loader, tests = DataLoader(Digits("train"), 64, shuffle=True), DataLoader(Digits("test"), 1000)
    seconds = accuracy = 0.0
    epochs = 0
    while accuracy < TARGET and epochs < most_epochs:
        epochs += 1
        start = time.monotonic()
        network.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        seconds += time.monotonic() - start
        schedule.step()
        network.eval()
        with torch.no_grad():
            right = sum(int((network(images.to(device)).argmax(1).cpu() == labels).sum()) for images, labels in tests)
        accuracy = 100 * right / len(tests.dataset)  # type: ignore[arg-type]
    return {"seconds": seconds, "accuracy": accuracy, "epochs": epochs}


def mnist(datadir: str, device: str, rounds: int = 3) -> dict[str, Any]:
    """Both, alternating, with seeds 0, 1, ...; the medians and how many times faster ours is."""
    runs = [(ours_to_target(datadir, device, seed), classic_to_target(datadir, device, seed)) for seed in range(rounds)]
    ours, classic = (float(np.median([pair[side]["seconds"] for pair in runs])) for side in (0, 1))
    return {"ours_seconds": ours, "classic_seconds": classic, "times_faster": classic / ours, "runs": runs}


def pipeline(folder: str, side: int = 224, rounds: int = 3) -> dict[str, Any]:
    """Images per second of random crops, best of ``rounds``: Pillow alone on all cores, our loader, torchvision's."""
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    from trainers.common import images

    workers = len(os.sched_getaffinity(0))
    source = images.find(folder, "train")
    chances = images.uniform(source.count, 5, 0, 1)
    plan = np.array_split(np.arange(source.count), max(1, source.count // 64))
    paths = [source.read(number)[2] for number in range(source.count)]

    def bare() -> None:
        def decode(path: str) -> None:
            with Image.open(path) as image:
                image.convert("RGB").load()

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(decode, paths))

    def ours() -> None:
        loader = images.Loader(source, workers)
        for _ in loader.batches(plan, side, lambda number, w, h: images.random_box(chances[number], w, h, 0.08)):
            pass

    def torchvision_loader() -> None:
        import torch
        from torchvision import datasets, transforms

        crop = transforms.Compose([transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(),
                                   transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])  # fmt: skip
        where = next(path for path in (Path(folder) / "train", Path(folder)) if path.is_dir())
        loader = torch.utils.data.DataLoader(datasets.ImageFolder(str(where), crop), 64, num_workers=workers)
        for _ in loader:
            pass

    best: dict[str, float] = {}
    for _, part in itertools.product(range(rounds), (bare, ours, torchvision_loader)):
        start = time.monotonic()
        part()
        best[part.__name__] = max(best.get(part.__name__, 0.0), source.count / (time.monotonic() - start))
    return {**best, "of_decode_floor": best["ours"] / best["bare"], "times_torchvision": best["ours"]
            / best["torchvision_loader"], "images": source.count, "workers": workers}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.trainers", description=__doc__)
    parser.add_argument("what", choices=("mnist", "pipeline"))
    parser.add_argument("data", help="folder with the data")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as our trainers have it; the peer gets it too
    result = mnist(args.data, args.device) if args.what == "mnist" else pipeline(args.data)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
