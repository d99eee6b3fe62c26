"""The commands about jobs and TPU pods, a module each; see :mod:`trainyard.commands`."""
