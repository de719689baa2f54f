"""Python runs this in every process that has the folder on its path: two ranks share the only GPU of the machine.

NCCL takes them for two machines, as it refuses two ranks of one machine on one GPU.  On such a machine most of
test_gpu*.py runs so::

    SYNKHRONOS_TEST_DEVICE=gpu PYTHONPATH=$PWD:tests/support/gpus/two_ranks_on_one python -m pytest tests/devices/test_gpu*.py

The tests that fail then check the GPU of each rank.
"""

import contextlib
import os

import pynvml

from synkhronos.devices.cuda import cuda_device

_handle = pynvml.nvmlDeviceGetHandleByIndex
_set_environment = cuda_device.set_environment


@contextlib.contextmanager
def show_only_gpu(*, CUDA_VISIBLE_DEVICES):
    os.environ["NCCL_HOSTID"] = f"host-{CUDA_VISIBLE_DEVICES}"
    with _set_environment(CUDA_VISIBLE_DEVICES="0"):
        yield


pynvml.nvmlDeviceGetCount = lambda: 2
pynvml.nvmlDeviceGetHandleByIndex = lambda index: _handle(0)
cuda_device.set_environment = show_only_gpu
