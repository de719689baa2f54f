"""Python runs this in every process that has the folder on its path: agents take one GPU of the machine each.

One machine is several hosts then: ``mpirun`` (with ``HYDRA_LAUNCHER=fork``) starts all agents here.  Agent i, and the
workers that it starts, see GPU i alone, and NCCL takes them for another machine's.
"""

import os

number = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if number:
    os.environ["CUDA_VISIBLE_DEVICES"] = number
    os.environ["NCCL_HOSTID"] = f"host-{number}"
if os.environ.get("PRETENDED_GPUS"):
    import pretend

    pretend.install()
