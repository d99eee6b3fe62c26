"""The launcher: turns what the platform put into the environment into what the framework needs, then runs the trainer.

Standard library only, Python 3.8 to 3.14, no import of a framework. One module a decision:

    settings   the launcher's own switches (LAUNCHER_*), read once
    host       what this machine has: device nodes, PCI ids, GPUs
    image      which framework and trainers the image holds (/opt/trainyard/image.json)
    versions   what each torch_xla release can do
    runtime    R: which accelerator runtime (rules R0 to R9, top to bottom)
    tpu_node   a legacy TPU node: its name, project, zone; what an API answer means
    cloud      metadata server, access tokens and the Cloud TPU API
    wait       the loop that waits for a TPU node
    tpu_vm     TPUs attached to this host: accelerator types, worker lists, bounds
    xrt        the variables of torch_xla's old runtime
    cluster    C: rank of this node, number of nodes, address of node 0
    exports    R and C put together: what is set, what is unset, what is warned about
    torchrun   the command that is really started
    process    exec, duties of PID 1, exit statuses, the termination log
    redact     what may be printed
    explain    the same for a person, and as JSON
    cli        arguments, and the order in which all of this runs

Nothing heavy is imported at start: `typing`, `re`, `dataclasses`, `argparse` and `enum` would each cost more than
the launcher's own work, and sockets, TLS and signals are imported only where there is something to ask or to wait for.
"""
