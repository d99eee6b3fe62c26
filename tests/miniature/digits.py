"""Learn digits with the miniature framework, and stop, resume and split as the smoke test asks of every trainer.

An epoch takes half a second, so that a signal in the second one of ten arrives before the run has ended.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time

import numpy as np
import torch

PIXELS, CLASSES, BATCH, RATE = 28 * 28, 10, 64, 0.5
EPOCH_SECONDS = 0.5


def flags() -> argparse.Namespace:
    """Return the command line, of which only what the tests use is known."""
    parser = argparse.ArgumentParser()
    for name in ("datadir", "output-dir", "checkpoint-dir", "device"):
        parser.add_argument(f"--{name}", default="")
    for name, default in {"epochs": 5, "seed": 0, "num-cores": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def read(folder: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``uint8[n, pixels]`` and labels ``uint8[n]`` of MNIST's files."""
    images = np.fromfile(f"{folder}/{split}-images-idx3-ubyte", np.uint8)[16:]
    return images.reshape(-1, PIXELS), np.fromfile(f"{folder}/{split}-labels-idx1-ubyte", np.uint8)[8:]


def connect(address: tuple[str, int]) -> socket.socket:
    """Return a connection to rank 0, which may begin to listen later than this process."""
    for _ in range(600):
        try:
            return socket.create_connection(address, timeout=60)
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"no rank 0 at {address}")


class Peer:
    """The other of two processes, which have half of each batch each.

    They are the two that the launcher has started, or, where it starts one, this process and a fork of it.
    """

    def __init__(self) -> None:
        self._forked = os.environ.get("WORLD_SIZE") != "2"
        if self._forked:
            ours, theirs = socket.socketpair()
            self.rank = 0 if os.fork() else 1
            connection = theirs if self.rank else ours
        else:
            self.rank = int(os.environ["RANK"])
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            if self.rank:
                connection = connect(address)
            else:
                with socket.create_server(address) as server:
                    server.settimeout(60)
                    connection, _ = server.accept()
        self._file = connection.makefile("rwb")

    def wait(self) -> None:
        """Wait until a forked process has ended; the launcher waits for those that it has started."""
        if self._forked:
            os.wait()

    def add(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array here and there, which has the same bits in both."""
        for turn in (0, 1):
            if turn == self.rank:
                self._file.write(values.tobytes())
                self._file.flush()
            else:
                other = np.frombuffer(self._file.read(values.nbytes)).reshape(values.shape)
        return values + other


class Run:
    """A run, from its last checkpoint if there is one.

    Attributes:
        chief: whether this process logs, saves and tests.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = torch.Classifier(PIXELS, CLASSES)
        self.step = self.resumed_from = 0
        self.losses: list[float] = []
        self.stopped = False
        self.peer = Peer() if args.num_cores == 2 else None
        self.chief = self.peer is None or self.peer.rank == 0
        path = f"{args.checkpoint_dir}/last.npz"
        if args.checkpoint_dir and os.path.exists(path):
            with np.load(path) as saved:
                self.model.weights, self.losses = saved["weights"], list(saved["losses"])
                self.step = self.resumed_from = int(saved["step"])

    def save(self) -> None:
        """Write a checkpoint, which has its name only when it is complete."""
        folder = self.args.checkpoint_dir
        if folder and self.chief:
            os.makedirs(folder, exist_ok=True)
            np.savez(f"{folder}/new.npz", weights=self.model.weights, losses=self.losses, step=self.step)
            os.replace(f"{folder}/new.npz", f"{folder}/last.npz")

    def train(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Train the epochs that are left; end after a step in which a signal arrived."""
        steps = len(labels) // BATCH
        while self.step < steps * self.args.epochs and not self.stopped:
            epoch, number = divmod(self.step, steps)
            order = np.random.default_rng([self.args.seed, epoch]).permutation(len(labels))
            chosen = order[number * BATCH :][:BATCH]
            mine = chosen[self.peer.rank :: 2] if self.peer else chosen
            loss, gradient = self.model.gradient(images[mine], labels[mine])
            total = np.append(gradient, loss)
            mean = (self.peer.add(total) if self.peer else total) / BATCH
            self.model.weights -= RATE * mean[:-1].reshape(gradient.shape)
            self.losses.append(float(mean[-1]))
            if number == 0 and self.chief:
                print(f"| Training Device={device()} Epoch={epoch + 1} Step={self.step} Loss={loss:.5f}", flush=True)
            self.step += 1
            time.sleep(EPOCH_SECONDS / steps)
            if number == steps - 1:
                self.save()

    def stop(self, *_: object) -> None:
        """End after this step."""
        self.stopped = True


def device() -> str:
    """Return where it runs, for the log."""
    if importlib.util.find_spec("torch_xla"):
        import torch_xla

        return torch_xla.device()
    return "cpu:0"


def main() -> int:
    """Train and test; return the exit status."""
    started = time.monotonic()
    args = flags()
    run = Run(args)
    signal.signal(signal.SIGTERM, run.stop)
    images, labels = read(args.datadir, "train")
    run.train(images, labels)
    if run.stopped:
        run.save()
    if not run.chief:
        return 0
    if run.peer:
        run.peer.wait()
    test_images, test_labels = read(args.datadir, "t10k")
    right = run.model.probabilities(test_images).argmax(axis=1) == test_labels
    summary = {
        "event": "summary",
        "status": "preempted" if run.stopped else "completed",
        "accuracy": round(100 * float(right.mean()), 2),
        "loss_first": run.losses[0],
        "loss_last": run.losses[-1],
        "images_per_second": round((run.step - run.resumed_from) * BATCH / (time.monotonic() - started), 1),
        "global_step": run.step,
        "resumed_from": run.resumed_from,
        "processes": args.num_cores,
        "weights_sha256": hashlib.sha256(run.model.weights.tobytes()).hexdigest(),
    }
    print(json.dumps(summary), flush=True)
    return 143 if run.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
