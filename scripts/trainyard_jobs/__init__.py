"""Training jobs for seven platforms and for TPU pods: write, check, rehearse and run them.

It builds on the package ``trainyard``, of which the command line alone knows it.
"""
