"""Python runs this in every process that has the folder on its path: two ranks share the only GPU of the machine.

NCCL takes them for two machines, as it refuses two ranks of one machine on one GPU.  On such a machine most of
test_gpu*.py runs so::

    SYNKHRONOS_TEST_DEVICE=gpu PYTHONPATH=$PWD:tests/support/gpus/two_ranks_on_one python -m pytest tests/devices/test_gpu*.py

The tests that fail then check the GPU of each rank.
"""

import contextlib
import os

import pynvml

from synkhronos.devices import cuda

_handle = pynvml.nvmlDeviceGetHandleByIndex
_only = cuda.restrict_visible_gpu


@contextlib.contextmanager
def show_only_gpu(place):
    os.environ["NCCL_HOSTID"] = f"host-{place}"
    with _only("0"):
        yield


pynvml.nvmlDeviceGetCount = lambda: 2
pynvml.nvmlDeviceGetHandleByIndex = lambda index: _handle(0)
cuda.restrict_visible_gpu = show_only_gpu
