"""The launcher: export the environment variables that the framework needs on this platform, then run the trainer.

The rules are specified in docs/launcher-contract.md; ids such as R4.1 in this package refer to it.

Standard library only, Python 3.8 to 3.14, no import of a framework. One module per decision:

    settings   the launcher's settings (LAUNCHER_* and options), read once
    host       devices and CPUs of this machine: device nodes, PCI ids, GPUs, CPU quota
    image      framework and trainers of the image (/opt/trainyard/recipe.json)
    versions   the launcher's version; what each torch_xla release supports
    runtime    the accelerator runtime (rules R0 to R9, first match decides)
    fetch      HTTP requests
    metadata   metadata server of Google Cloud
    tpu_vm     TPUs attached to this host: accelerator types, worker lists, bounds
    sources    the table of what says who this node is: variables, what they count, where that is documented
    readers    what reads its rows
    cluster    rank of this node, number of nodes, address of node 0: the first row that has them
    exports    variables to set and to unset, and warnings, from runtime and cluster
    processes  how many processes this node starts, and the coordinates of each
    torchrun   the command under torchrun, for elastic jobs
    process    exec, signals while waiting, termination log
    supervisor the processes that are started, their signals and exit statuses
    outputs    files of their output and errors
    redact     removal of secrets from output
    tokens     the forms of tokens, which builds search for, too
    explain    the result as text and as JSON
    sagemaker  what SageMaker's argument `train` starts
    jax        what jax.distributed needs
    gpus       driver and GPUs that the image can train on
    tpu_node   (package) TPU nodes and XRT, imported on their variables
    preflight  (package) tests of all nodes before the command, imported on request
    cli        arguments, and the order of the steps

The launcher starts in about 12 ms. `typing`, `re`, `json`, `dataclasses`, `argparse` and `enum` would each take longer
to import than the launcher's own work, so none of them is used where there are plain variables only; sockets, TLS and
signals are imported only when needed.
"""
