"""Faults that code without knowledge of the rules plants in an image, and how many of them ``trainyard verify`` finds.

* :mod:`~benchmarks.mutations.layout` reads an image and makes changed copies of it;
* :mod:`~benchmarks.mutations.elf` reads what shared libraries need;
* :mod:`~benchmarks.mutations.files`, :mod:`~benchmarks.mutations.configuration`,
  :mod:`~benchmarks.mutations.instructions` and :mod:`~benchmarks.mutations.locks` choose the faults at random;
* :mod:`~benchmarks.mutations.plan` numbers them;
* :mod:`~benchmarks.mutations.foreign` builds images that are not ours, which must pass;
* :mod:`~benchmarks.mutations.judge` runs ``trainyard verify`` on each;
* :mod:`~benchmarks.mutations.report` writes the result.
"""
