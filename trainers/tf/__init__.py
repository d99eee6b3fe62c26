"""TensorFlow trainers: one file each, on CPU, GPU and TPU through ``_strategy``."""

import os

# Read when tensorflow is imported, which is after this package: no chatter about oneDNN and CPU features.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# MB that a read from Cloud Storage fetches, whatever was asked for: TensorFlow's 64 suit files read from end to end,
# not records in random order.
os.environ.setdefault("GCS_READ_CACHE_BLOCK_SIZE_MB", "1")
