"""TPU VMs."""
