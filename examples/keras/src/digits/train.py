"""Train the network: python -m digits.train, or digits-train where the package is installed.

The same command continues a run from its last epoch. On SIGTERM, a run ends with status 143 (128 + SIGTERM), as
schedulers expect of a job that is to be started again.
"""

import argparse
import math
import signal
import sys
from pathlib import Path

import keras

from digits import data
from digits.model import build_model


class ExitOnSigterm(keras.callbacks.Callback):
    """Ends the process at the end of a batch, so that no file is half written; BackupAndRestore has the last epoch."""

    def __init__(self):
        super().__init__()
        self.received = False
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, signum, frame):
        self.received = True

    def on_train_batch_end(self, batch, logs=None):
        if self.received:
            print("SIGTERM: the same command continues from the last epoch", flush=True)
            sys.exit(128 + signal.SIGTERM)


def parse_args():
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Train a network that reads handwritten digits.")
    parser.add_argument("--output-dir", type=Path, default=Path("output"), help="of backup, history and model")
    parser.add_argument("--epochs", type=int, default=20, help="default: 20")
    parser.add_argument("--batch-size", type=int, default=32, help="default: 32")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="highest one; default: 0.001")
    parser.add_argument("--dropout", type=float, default=0.3, help="default: 0.3")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout; default: 0")
    return parser.parse_args()


def main():
    """Train, save the model, and print its accuracy on the test set."""
    args = parse_args()
    stop = ExitOnSigterm()
    keras.utils.set_random_seed(args.seed)
    (images, labels), test = data.load()

    model = build_model(args.dropout)
    steps = args.epochs * math.ceil(len(images) / args.batch_size)
    model.compile(
        optimizer=keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(args.learning_rate, steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    args.output_dir.mkdir(parents=True, exist_ok=True)
    # Two copies of the backup: a process may be killed while it writes one.
    backup = keras.callbacks.BackupAndRestore(
        args.output_dir / "backup", double_checkpoint=True, delete_checkpoint=False
    )
    history = keras.callbacks.CSVLogger(args.output_dir / "history.csv", append=True)
    model.fit(
        images,
        labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=test,
        callbacks=[backup, history, stop],
        verbose=2,  # a line per epoch
    )
    model.save(args.output_dir / "model.keras")
    _, accuracy = model.evaluate(*test, verbose=0)
    print(f"accuracy {accuracy:.4f} of {len(test[0])} images, model in {args.output_dir / 'model.keras'}")


if __name__ == "__main__":
    main()
