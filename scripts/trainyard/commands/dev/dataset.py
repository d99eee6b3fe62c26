"""``trainyard dev dataset``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options

GROUP = "project"


@options.command(
    "Write a small data set to train on without a network.",
    "trainyard dev dataset digits data/digits",
    "trainyard dev dataset digits data/digits --gz",
    "trainyard dev dataset flowers data/flowers --form tfrecord --train 100 --test 20",
    "trainyard dev dataset text data/text",
)
@click.argument("kind", type=click.Choice(["digits", "flowers", "text"]))
@click.argument("folder", type=options.Folder(file_okay=False, path_type=Path))
@options.flag("--gz", help="digits: compress the files with gzip.")
@options.option(
    "--form", type=click.Choice(["folder", "tfrecord", "tar"]), default="folder", help="flowers: format of the files."
)
@options.option("--train", type=options.Count(min=1), default=500, help="flowers: number of training pictures.")
@options.option("--test", type=options.Count(min=1), default=100, help="flowers: number of test pictures.")
@options.option("--seed", type=int, default=0, help="digits: selects the test images; flowers: draws other pictures.")
@options.flag("--sources", help="text: write the sources of Python's standard library, too.")
def command(kind: str, folder: Path, gz: bool, form: str, train: int, test: int, seed: int, sources: bool) -> None:
    """Write a data set into FOLDER and print the folder.

    digits: scikit-learn's 1,797 handwritten digits as the IDX files of MNIST. flowers: drawn flowers of five kinds.
    text: the documentation of the Python that runs this, as JSON lines.
    """
    if kind == "digits":
        from trainyard.sandbox.datasets import digits

        print(digits.write_idx(folder, gz=gz, seed=seed))
    elif kind == "text":
        from trainyard.sandbox.datasets import text

        print(text.write(folder, sources=sources))
    else:
        import importlib.util

        from trainyard.common.errors import UserError
        from trainyard.sandbox.datasets import flowers

        if importlib.util.find_spec("PIL") is None:
            raise UserError("flowers need Pillow: install pillow")

        print(flowers.write(folder, form, train, test, seed))
