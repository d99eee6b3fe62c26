"""Training progress from the replicas' logs: steps, losses, rates, accuracies, and the trainer's summary."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

from trainyard.sandbox.curves import STEP, Curves

#: Trainyard's lines (trainers/common/job.py), and those in the format of pytorch/xla's examples.
_LINE = re.compile(r"step (\d+)/\d+: (?:loss ([\d.]+), .* ([\d,]+) \w+/s|accuracy ([\d.]+))")
_TRAIN = re.compile(r"\| Training Device=\S+ Epoch=(\d+) Step=(\d+) Loss=(\S+) Rate=(\S+) ")
_TEST = re.compile(r"Epoch (\d+) test end .*Accuracy=([\d.]+)")
#: Other trainers: "step 20", "Step: 20", '"global_step": 20', "iter 20", "Epoch=2".
_EPOCH = re.compile(r"\bepoch\b[\"']?\s*[=: ]\s*(\d+)", re.IGNORECASE)


class Progress:
    """The progress of all replicas so far.

    Attributes:
        losses, rates: (seconds since the start, value); the rate is as in the log, torch_xla's of one device.
        curves: every loss that the lines name, such as val_loss.
        accuracies: (seconds, epoch, percent) after each epoch.
        summary: the trainer's summary, the JSON object of its last line; {} until it is printed.
        resumed_from: the steps from which trainers resumed.
        matched: the patterns that matched a line.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        """``patterns``: regular expressions to search lines for."""
        self.losses: list[tuple[float, float]] = []
        self.rates: list[tuple[float, float]] = []
        self.curves = Curves()
        self.accuracies: list[tuple[float, int, float]] = []
        self.summary: dict[str, Any] = {}
        self.resumed_from: list[int] = []
        self.training = False
        self.epoch = 0
        self._steps: dict[int, int] = {}  # epoch -> highest step; 0 if the log does not count epochs
        self.matched: set[str] = set()
        self._patterns = {pattern: re.compile(pattern) for pattern in patterns}

    def add(self, line: str, seconds: float) -> None:
        """Evaluate a log line, printed ``seconds`` after the start."""
        named = self.curves.add(line, seconds)
        self.matched |= {text for text, pattern in self._patterns.items() if pattern.search(line)}
        if train := _TRAIN.search(line):
            epoch, step = int(train[1]), int(train[2])
            self._reach(epoch, step)
            with contextlib.suppress(ValueError):
                self.losses.append((seconds, float(train[3])))
                self.rates.append((seconds, float(train[4])))
        elif ours := _LINE.match(line):
            self._reach(0, int(ours[1]))
            if ours[4]:
                self.accuracies.append((seconds, 0, float(ours[4])))
            else:
                self.losses.append((seconds, float(ours[2])))
                self.rates.append((seconds, float(ours[3].replace(",", ""))))
        elif test := _TEST.search(line):
            self.accuracies.append((seconds, int(test[1]), float(test[2])))
        elif line.startswith("{") and self._summary(line):
            pass
        elif match := re.match(r"Resumed from step (\d+)", line):
            self.resumed_from.append(int(match[1]))
        elif not line.startswith("launch: "):
            self.losses += [(seconds, value) for _, value in named[:1]]
            epoch_word, step_word = _EPOCH.search(line), STEP.search(line)
            if step_word:
                self._reach(int(epoch_word[1]) if epoch_word else 0, int(step_word[1]))

    def _reach(self, epoch: int, step: int) -> None:
        self.training = True
        self.epoch = max(self.epoch, epoch)
        self._steps[epoch] = max(self._steps.get(epoch, 0), step)

    def _summary(self, line: str) -> bool:
        """Return whether a line is the trainer's summary, which is kept."""
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict) and found.get("event") == "summary":
                self.summary = found
                return True
        return False

    def reached(self, epoch: int, step: int) -> bool:
        """Whether the log has shown this step of an epoch, or a later one.

        With ``epoch`` 0, steps count from the start of training, each epoch with the steps that the log has shown.
        """
        if not epoch:
            before = sum(most + 1 for number, most in self._steps.items() if number < self.epoch)
            return self.training and before + self._steps.get(self.epoch, 0) >= step
        return self.epoch > epoch or (self.epoch == epoch and self._steps.get(epoch, -1) >= step)

    @property
    def accuracy(self) -> float | None:
        """The last test accuracy, in percent."""
        if self.summary.get("accuracy") is not None:
            return float(self.summary["accuracy"])
        return self.accuracies[-1][2] if self.accuracies else None

    @property
    def rate(self) -> float | None:
        """Return the images per second of all devices, from the trainer's summary; else the last rate in the log."""
        if self.summary.get("images_per_second") is not None:
            return float(self.summary["images_per_second"])
        return self.rates[-1][1] if self.rates else None
