"""Reference trainers: MNIST, ImageNet and flowers, for PyTorch and TensorFlow.

``python -m trainers.<torch|tf>.<name> --help`` lists a trainer's flags. Every file in ``trainers/torch`` and
``trainers/tf`` without a leading underscore is a trainer; shared code that needs no framework is in
``trainers/common``.
"""

__version__ = "0.1.0"  # that of Trainyard; an image has no package metadata of the trainers
