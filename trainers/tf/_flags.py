"""Flags of all TensorFlow trainers, apart from the code they steer so that tensorflow need not be imported first."""

from __future__ import annotations

from trainers.common.flags import Flag, one_of, whole

FLAGS = (
    Flag("strategy", one_of("auto", "one", "mirrored", "multiworker", "tpu"), "auto", "tf.distribute strategy; auto:"
         " multiworker with a TF_CONFIG of several workers, tpu with a TPU, mirrored with several GPUs, else one"),
    Flag("num-cores", whole(0), 0, "devices to use on this machine (a CPU counts as as many as you like); 0: all"),
    Flag("jit-compile", None, False, "compile steps with XLA: for one device; slower on a CPU; a TPU always does"),
    Flag("steps-per-execution", whole(1), 32, "most training steps in one call (MNIST and flowers)"),
)  # fmt: skip
