"""Python runs this in every process that has the folder on its path: agents take some of the machine's GPUs each.

One machine is several hosts then: ``mpirun`` (with ``HYDRA_LAUNCHER=fork``) starts all agents here.  Agent i, and the
workers that it starts, see GPU i alone, or those that HOST_GPUS lists for host i ("0,1;2,3"), and NCCL takes them for
another machine's.
"""

import os

number = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if number:
    gpus_by_host = os.environ.get("HOST_GPUS")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus_by_host.split(";")[int(number)] if gpus_by_host else number
    os.environ["NCCL_HOSTID"] = f"host-{number}"
if os.environ.get("FAKE_GPUS"):
    import fake_gpus

    fake_gpus.install()
