"""List in a table (R13) which variables say who this node or process is, what they count, and where that is documented.

`cluster` goes through the rows in order, and `readers` has what reads one.
"""

from __future__ import annotations


class Source:
    """Describe a row.

    Attributes:
        rule: its id in docs/launcher-contract.md. name: what logs and messages call it.
        url: where the variables are documented.
        rank, size, address: variables with the number of this node or process, how many there are, and the address of
            the first one, or several, separated by blanks, of which that is the first.
        local_rank, local_size: the same of the processes of this node; "" where the row counts nodes.
        signals: the row is read if one of these is set; by default the rank of a node, or the number of processes.
        variables: what it reads beside them.
        read: the function of `readers` that reads the row. head: that which finds an address of the first.
        remedy: how ranks get an address that is unknown; "" if by any means.
        main: variable with the number of the node that becomes node 0, and does not know its own address.
        own: the user's variables: they decide for a single node, too, and the next rows may know an address.
    """

    head = remedy = main = ""
    own = False

    def __init__(
        self,
        rule: str,
        name: str,
        url: str,
        *numbers: str,
        local: str = "",
        signals: str = "",
        others: str = "",
        read: str = "",
        **more: object,
    ) -> None:
        self.rule, self.name, self.url = rule, name, url
        self.rank, self.size, self.address = (*numbers, "", "", "")[:3]
        self.local_rank, _, self.local_size = local.partition(" ")
        self.__dict__.update(more)
        self.read = read or ("processes" if local else "nodes")
        self.signals = (signals or (self.size if local else self.rank)).split()
        named = [*numbers, *local.split(), self.main, *others.split()]
        self.variables = [variable for variable in named if variable and variable not in self.signals]


# What counts processes comes first: variables that count nodes are inherited by every process of a node.
# fmt: off
SOURCES = (
    Source("R13.1", "torchelastic", "https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables",
           signals="TORCHELASTIC_RUN_ID", others="GROUP_RANK GROUP_WORLD_SIZE", read="torchelastic"),
    Source("R13.2", "MASTER_ADDR",
           "https://github.com/kubeflow/training-operator/blob/release-1.9/pkg/controller.v1/pytorch/envvar.go",
           "RANK", "WORLD_SIZE", "MASTER_ADDR", local="LOCAL_RANK LOCAL_WORLD_SIZE", signals="RANK", read="ranks"),
    Source("R13.10", "Open MPI", "https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html",
           "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri",
           local="OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE", head="open_mpi",
           remedy="mpirun -x MASTER_ADDR=HOST"),
    Source("R13.11", "PMI", "https://github.com/pmodels/mpich/tree/main/src/pm/hydra", "PMI_RANK", "PMI_SIZE",
           local="MPI_LOCALRANKID MPI_LOCALNRANKS", head="hydra", remedy="mpiexec -genv MASTER_ADDR HOST"),
    Source("R13.33", "Horovod", "https://github.com/horovod/horovod/blob/master/horovod/runner/gloo_run.py",
           "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR",
           local="HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE"),
    Source("R13.34", "MVAPICH", "https://mvapich.cse.ohio-state.edu/downloads/", "MV2_COMM_WORLD_RANK",
           "MV2_COMM_WORLD_SIZE", local="MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
    Source("R13.12", "Slurm", "https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES",
           signals="SLURM_STEP_ID SLURM_PROCID", others="SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES"
           " SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NODELIST SLURM_LOCALID SLURM_NODEID SLURM_JOB_ID", read="slurm"),
    Source("R13.13", "NODE_RANK", "", "NODE_RANK", "NNODES", "MASTER_ADDR", own=True),
    Source("R13.25", "JAX",
           "https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/jax/jax.go",
           "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "MASTER_ADDR",
           others="JAX_COORDINATOR_ADDRESS JAX_COORDINATOR_PORT", own=True),
    Source("R13.3", "PET_*", "https://github.com/pytorch/pytorch/blob/main/torch/distributed/argparse_util.py",
           signals="PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_RDZV_ENDPOINT",
           others="PET_MASTER_PORT PET_RDZV_BACKEND", read="pet"),
    Source("R13.4", "CLUSTER_SPEC", "https://cloud.google.com/vertex-ai/docs/training/distributed-training",
           signals="CLUSTER_SPEC", read="tasks"),
    Source("R13.5", "TF_CONFIG", "https://cloud.google.com/vertex-ai/docs/training/distributed-training",
           signals="TF_CONFIG", read="tasks"),
    Source("R13.6", "JOB_COMPLETION_INDEX", "https://jobset.sigs.k8s.io/docs/concepts/",
           signals="TPU_WORKER_ID MEGASCALE_NUM_SLICES JOB_COMPLETION_INDEX", read="indexed_job",
           others="NNODES MEGASCALE_SLICE_ID MEGASCALE_COORDINATOR_ADDRESS JOBSET_NAME REPLICATED_JOB_NAME"),
    Source("R13.14", "LeaderWorkerSet", "https://github.com/kubernetes-sigs/lws/blob/main/pkg/utils/pod/pod_utils.go",
           "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", signals="LWS_GROUP_SIZE"),
    Source("R13.15", "Volcano",
           "https://github.com/volcano-sh/volcano/blob/master/pkg/controllers/job/plugins/svc/svc.go",
           signals="VC_TASK_INDEX VK_TASK_INDEX", others="HOSTNAME", read="volcano"),
    Source("R13.16", "SageMaker",
           "https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html",
           signals="SM_HOSTS TRAINING_JOB_NAME", others="SM_CURRENT_HOST SM_CURRENT_INSTANCE_GROUP_HOSTS",
           read="sagemaker"),
    Source("R13.22", "SkyPilot", "https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html",
           "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    Source("R13.23", "dstack", "https://github.com/dstackai/dstack/blob/master/mkdocs/docs/reference/env.md",
           "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
    Source("R13.24", "AWS Batch", "https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html",
           "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
           main="AWS_BATCH_JOB_MAIN_NODE_INDEX"),
    Source("R13.28", "RunPod", "https://docs.runpod.io/instant-clusters/configuration",
           "NODE_RANK", "NUM_NODES", "PRIMARY_ADDR"),
    Source("R13.29", "Lepton", "https://docs.nvidia.com/dgx-cloud/lepton/features/batch-job/predefined-env-vars",
           "LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS", "LEPTON_JOB_NAME", head="lepton",
           others="LEPTON_JOB_SERVICE_PREFIX LEPTON_SUBDOMAIN"),
    Source("R13.30", "Beaker", "https://github.com/allenai/beaker-gantry",
           "BEAKER_REPLICA_RANK", "BEAKER_REPLICA_COUNT", "BEAKER_LEADER_REPLICA_HOSTNAME"),
    Source("R13.31", "Metaflow",
           "https://github.com/Netflix/metaflow/blob/master/metaflow/plugins/parallel_decorator.py",
           "MF_PARALLEL_NODE_INDEX", "MF_PARALLEL_NUM_NODES", "MF_PARALLEL_MAIN_IP"),
    Source("R13.32", "NGC", "https://github.com/google/paxml/blob/main/paxml/main.py",
           "NGC_ARRAY_INDEX", "NGC_ARRAY_SIZE", "NGC_MASTER_ADDR"),
)
# Rank -> size. A rank over 0 without a source of coordinates is one of several processes (R13.18).
# PALS is mpiexec of HPE Cray, whose PMI_RANK and PMI_SIZE are refused apart; JSM jsrun of LSF; BATCH Google Cloud's.
RANKS = (
    *((row.rank, row.size) for row in SOURCES if row.rank and row.rank != "PMI_RANK"),
    ("MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"), ("BATCH_TASK_INDEX", "BATCH_TASK_COUNT"),
    ("CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"), ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), ("PALS_RANKID", ""), ("PMIX_RANK", ""),
)
# fmt: on

# The variables of these sources, for `--explain`.
_NAMES = [name for row in SOURCES for name in row.signals + row.variables if name != "HOSTNAME"]
SIGNALS = tuple(dict.fromkeys(["MASTER_ADDR", "MASTER_PORT", *_NAMES]))
