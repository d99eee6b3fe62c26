"""Faults that code without knowledge of the rules plants in an image, and how many of them ``trainyard verify`` finds.

* :mod:`~tests.mutations.layout` reads an image and makes changed copies of it;
* :mod:`~tests.mutations.elf` reads what shared libraries need;
* :mod:`~tests.mutations.files`, :mod:`~tests.mutations.configuration`,
  :mod:`~tests.mutations.instructions` and :mod:`~tests.mutations.locks` choose the faults at random;
* :mod:`~tests.mutations.plan` numbers them;
* :mod:`~tests.mutations.foreign` builds images that are not ours, which must pass;
* :mod:`~tests.mutations.judge` runs ``trainyard verify`` on each;
* :mod:`~tests.mutations.report` writes the result.
"""
