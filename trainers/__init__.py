"""Train reference models: MNIST, flowers, ImageNet and language, in PyTorch, PyTorch/XLA, TensorFlow and JAX.

``python -m trainers.<torch|torch_xla|tf|jax>.<name> --help`` lists a trainer's options. A file of these folders without
a leading underscore is a trainer; shared code that needs no framework is in ``trainers/common``.
"""

__version__ = "0.1.0"  # of Trainyard; an image has no package metadata of the trainers
