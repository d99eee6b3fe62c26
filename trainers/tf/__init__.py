"""TensorFlow trainers: one file each, on CPU, GPU and TPU through ``_strategy``."""

import os

# Read when tensorflow is imported, which is after this package: no chatter about oneDNN and CPU features.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
