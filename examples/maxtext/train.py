"""Train a model with MaxText, with the words of its command line after the configuration, which is its base.yml.

    python train.py run_name=mine dataset_type=synthetic steps=10 ...

MaxText itself joins the other hosts of a TPU slice when it saves checkpoints. Here JAX has joined them before, with
what the launcher exports, so that a run without checkpoints, one on CPUs and one in a rehearsal meet in the same way.
"""

import os
import sys
from pathlib import Path

import jax

if __name__ == "__main__":
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        count, number = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
        jax.distributed.initialize(address, count, number)

    import maxtext
    from absl import app
    from maxtext.trainers.pre_train import train

    config = Path(maxtext.__file__).with_name("configs") / "base.yml"
    app.run(train.main, argv=[sys.argv[0], str(config), *sys.argv[1:]])
