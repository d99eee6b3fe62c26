"""JAX trainers: one file each. They run on CPU, GPU and TPU; ``_devices`` joins the processes and makes the mesh."""

import os

# XLA reads it when jaxlib is imported, after this package. 2: no messages about CPU features and compilation.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
