"""Stand-ins for CUDA and NCCL, by which JAX arrays in host memory pass through the code for GPUs.

Call `install` before `synkhronos.fork`.  `take_collectives` then describes the master's collectives.

The stand-in for NCCL reduces by shared memory; CUDA's streams do nothing, since XLA computes in the thread that
launches.
"""

import ctypes
import sys
import types

import ml_dtypes
import numpy as np

from synkhronos import startup
from synkhronos.devices import HOST, JAX
from synkhronos.devices.cuda import nccl
from synkhronos.devices.jax import JaxDevice
from synkhronos.devices.jax.compute_stream import ComputeStream
from synkhronos.engines.xla.executable import Executable

_DTYPES = {number: np.dtype(getattr(ml_dtypes, name, name)) for name, number in nccl.NCCL_DTYPES.items()}
_OPS = {number: name for name, number in nccl.NCCL_OPS.items()}
_STREAM, _SIDE_STREAM = 7, 8
_collectives: list[str] = []


class _NcclStandIn:
    def __init__(self, rank):
        self._rank = rank

    def all_reduce(self, source, target, count, dtype, op, handle, stream):
        dtype = _DTYPES[dtype]
        arrays = [
            np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)
            for address in (source, target)
        ]
        HOST.get_communicator(self._rank)._reduce(*arrays, _OPS[op], count, dtype, range(self._rank.size))
        _collectives.append(f"{'started' if stream == _SIDE_STREAM else 'all-reduced'} {count} of {dtype};")

    def comm_get_async_error(self, handle):
        return 0


class _StagingStandIn:
    stream = handle = _STREAM
    side_stream, event = _SIDE_STREAM, 1
    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_READY=600)

    def __init__(self):
        self.arrays = self.driver = self
        self.host_flags = np.zeros(1, np.int32)

    def set_current_gpu(self):
        pass

    def get_pointer(self, array):
        return int(array.block_until_ready().unsafe_buffer_pointer())

    def cuStreamQuery(self, stream):  # noqa: N802 - CUDA's name
        return (0,)

    def cuEventRecord(self, event, stream):  # noqa: N802 - CUDA's name
        pass

    def cuStreamWaitEvent(self, stream, event, flags):  # noqa: N802 - CUDA's name
        pass

    def cuMemcpyAsync(self, target, source, nbytes, stream):  # noqa: N802 - CUDA's name
        ctypes.memmove(target, source, nbytes)


class _CommunicatorStandIn(nccl.NcclCommunicator):
    def connect(self, generations):
        connection = self._connection
        if len(set(generations)) > 1 or not self.generation:
            comm = types.SimpleNamespace(abort=lambda: None, _comm=1)
            connection._set_current_comm(connection._attempt, comm)
            connection.generation = max(generations) + 1


def install():
    """Let ranks treat their JAX arrays on the CPU as arrays on GPUs."""
    sys.modules["nccl"], sys.modules["nccl.bindings"] = types.ModuleType("nccl"), types.ModuleType("nccl.bindings")
    sys.modules["nccl.bindings"].nccl = None
    nccl.check_result = lambda results: None
    set_up, launch = startup._SetUpRank.run, Executable._launch

    def set_up_jax(self, rank):
        set_up(self, rank)
        rank.device = JAX
        JAX.get_communicator(rank)._nccl = _NcclStandIn(rank)

    def launch_and_wait(self, arguments):
        launch(self, arguments)
        JAX.wait([cell[0] for cell in self._updated])

    startup._SetUpRank.run = set_up_jax
    Executable._launch = launch_and_wait
    JaxDevice.can_communicate = lambda self, dtype, op=None: str(dtype) in nccl.NCCL_DTYPES
    JaxDevice.get_communicator = lambda self, rank: rank.registry.get_or_create(
        _CommunicatorStandIn, lambda: _CommunicatorStandIn(rank, _StagingStandIn())
    )
    JaxDevice._compute_stream = ComputeStream(_STREAM, True)


def take_collectives():
    """Return descriptions of the master's collectives since the last call."""
    descriptions = " ".join(_collectives)
    _collectives.clear()
    return descriptions
