"""GPUs that are not there: JAX arrays on the CPU go through the very code that calls CUDA and NCCL.

With this folder on PYTHONPATH and ``FAKE_GPUS=2`` each machine and each simulated host has two GPUs.  The packages
beside this file are small fakes of those that the library calls:

``pynvml``
    Counts them.
``cuda``
    Host memory in place of GPU memory.  Streams are synchronous.
``pygpu``
    Theano's arrays.  Theano keeps shared variables and inputs in them, and computes on copies in host memory, as its
    Ops for GPUs need the real pygpu.
``nccl``
    Collectives over TCP, between processes of one host or of several.  As in NCCL, a rank waits forever for a peer
    that does not start the operation, until an abort; and the log names the network interface.

`install`
    Runs by itself in each process (``sitecustomize.py``).
"""

import ctypes
import functools
import time

#: Functions in C, by their names in `LaunchState`: alive as long as the process.
_CALLBACKS = {}


def find_function_addresses():
    """Return the addresses of functions in C that call the fakes."""
    from cuda.bindings import driver
    from nccl.bindings import nccl

    def run(call, *arguments):
        try:
            call(*arguments)
        except BaseException:
            return 1
        return 0

    def fill(target, value, n_items, stream):
        ctypes.memset(target, value, 4 * n_items)

    p, u, n, i = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_int
    for name, call, types in (
        ("all_reduce_address", nccl.all_reduce, (p, p, n, i, i, p, p)),
        ("copy_address", driver.cuMemcpyAsync, (p, p, n, p)),
        ("fill_address", fill, (p, u, n, p)),
        ("record_address", driver.cuEventRecord, (p, p)),
        ("wait_address", driver.cuStreamWaitEvent, (p, p, u)),
    ):
        _CALLBACKS.setdefault(name, ctypes.CFUNCTYPE(i, *types)(functools.partial(run, call)))
    return {name: ctypes.cast(callback, p).value for name, callback in _CALLBACKS.items()}


def install():
    """Let the library treat JAX arrays on the CPU as arrays on GPUs."""
    import cuda.core
    from nccl import wire

    import synkhronos.devices.cuda
    from synkhronos.devices.jax import xla_communicator
    from synkhronos.devices.jax.compute_stream import ComputeStream
    from synkhronos.devices.jax_device import JaxDevice
    from synkhronos.devices.pygpu_device import PygpuDevice

    def start(self, place):
        cuda.core.PCI_ADDRESS = place
        self._import_jax().devices()

    def start_pygpu(self, place):
        import theano.compile
        import theano.gpuarray.type
        from pygpu.gpuarray import GpuContext

        cuda.core.PCI_ADDRESS = place
        theano.config.cxx = ""  # transfers between GPU and host have a version in Python
        theano.gpuarray.type.reg_context(None, GpuContext())
        theano.compile.shared_constructor(theano.gpuarray.type.gpuarray_shared_constructor)

    synkhronos.devices.cuda.has_context = lambda: cuda.core.Device.is_started

    PygpuDevice.requirements = {}
    PygpuDevice.open_gpu = start_pygpu
    PygpuDevice.stream = cuda.core.XLA_STREAM

    xla_communicator.find_function_addresses = find_function_addresses

    JaxDevice.requirements = {}
    JaxDevice.open_gpu = start
    JaxDevice.get_address = lambda self, array: int(array.block_until_ready().unsafe_buffer_pointer())
    JaxDevice._order_copies_after = lambda self, array: array.block_until_ready()
    JaxDevice._compute_stream = ComputeStream(cuda.core.XLA_STREAM, True)
    # Streams are synchronous here, but XLA is not, so its launches are waited for.
    launched = JaxDevice.finish_launch

    def launched_and_done(self, results):
        import jax

        results = list(results)
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)])
        launched(self, results)

    JaxDevice.finish_launch = launched_and_done
    rewrap = JaxDevice.rewrap

    def rewrap_when_done(self, value, is_complete=False):
        while not is_complete and wire.is_busy():
            time.sleep(0.001)
        return rewrap(self, value, is_complete)

    JaxDevice.rewrap = rewrap_when_done
