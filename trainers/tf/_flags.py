"""Flags of all TensorFlow trainers, in a module that does not import tensorflow, so that ``--help`` is fast."""

from __future__ import annotations

from trainers.common.flags import Flag, integer, one_of

FLAGS = (
    Flag("strategy", one_of("auto", "one", "mirrored", "multiworker", "tpu"), "auto", "tf.distribute strategy; auto:"
         " multiworker with a TF_CONFIG of several workers, tpu with a TPU, mirrored with several GPUs, else one"),
    Flag("num-cores", integer(0), 0, "devices of this machine to use; 0: all (a CPU can be split into any number)"),
    Flag("jit-compile", None, False, "compile steps with XLA; single device only, slower on a CPU, always on for TPUs"),
    Flag("steps-per-execution", integer(1), 32, "maximum number of training steps per call (MNIST and flowers)"),
)  # fmt: skip
