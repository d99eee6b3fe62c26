"""TensorFlow trainers: one file each. They run on CPU, GPU and TPU; ``_strategy`` chooses the strategy."""

import os

# TensorFlow reads these when it is imported, which happens after this package. 2: no messages about oneDNN and CPU
# features.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# MB that each read from Cloud Storage fetches. TensorFlow's default of 64 suits sequential reads of large files, not
# records in random order.
os.environ.setdefault("GCS_READ_CACHE_BLOCK_SIZE_MB", "1")
