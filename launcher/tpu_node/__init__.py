"""TPU nodes, and torch_xla's old runtime XRT (R2, R4.4, R5 to R7, R11, R12.1 to R12.4).

Imported only if a variable names a TPU node or is XRT's, or the image has a torch_xla without PJRT.

    node   a TPU node: name, project, zone; meaning of a response of the API
    xrt    the grammar of XRT_TPU_CONFIG, and the variables of TPU nodes and TPU VMs
    rules  what they mean for the runtime, and what is exported for them
    cloud  access tokens and the Cloud TPU API
    wait   the loop that waits for a TPU node

The rules are specified in docs/launcher-contract-tpu-nodes.md.
"""
