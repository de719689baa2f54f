"""Programs in which XLA on the CPU calls the handlers of nccl_ffi.cc, with Python functions for NCCL and CUDA.

test_nccl_ffi.py runs each function in a new process; the functions print the calls.
"""

import ctypes
import sys
import types

import numpy as np

from synkhronos.devices.jax import nccl_handlers, xla_communicator
from synkhronos.devices.jax.ffi_collectives import FfiCollectives

STREAM, SIDE, EVENT, COMM = None, 8, 9, 1234  # XLA has no stream on the CPU
calls = []
#: Return codes of the next calls of NCCL.
codes = []


def _all_reduce(source, target, count, dtype, op, comm, stream):
    calls.append(f"{count} of {dtype} by {op} in {comm} on {stream}")
    code = codes.pop(0) if codes else 0
    if not code and dtype == 7:
        array = np.ctypeslib.as_array((ctypes.c_float * count).from_address(target))
        array[:] = 2 * np.ctypeslib.as_array((ctypes.c_float * count).from_address(source))
    return code


def _copy_to_host(target, source, nbytes, stream):
    calls.append(f"flag on {stream}")
    ctypes.memmove(target, source, nbytes)
    return 0


def _fill_words(target, value, count, stream):
    ctypes.memset(target, value, 4 * count)
    return 0


def _record_event(event, stream):
    calls.append(f"record {event} on {stream}")
    return 0


def _wait_for_event(stream, event, flags):
    calls.append(f"{stream} waits for {event}")
    return 0


def connect():
    """Return a connected communicator."""
    p, u, n, i = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_int
    kinds = {
        "all_reduce_address": (_all_reduce, p, p, n, i, i, p, p),
        "copy_address": (_copy_to_host, p, p, n, p),
        "fill_address": (_fill_words, p, u, n, p),
        "record_address": (_record_event, p, p),
        "wait_address": (_wait_for_event, p, p, u),
    }
    functions = {name: ctypes.CFUNCTYPE(i, *types)(call) for name, (call, *types) in kinds.items()}
    connect.functions = functions  # keeps the callbacks alive
    xla_communicator.find_function_addresses = lambda: {
        name: ctypes.cast(call, p).value for name, call in functions.items()
    }
    driver = types.SimpleNamespace(
        cuStreamQuery=lambda stream: (0,), CUresult=types.SimpleNamespace(CUDA_ERROR_NOT_READY=600)
    )
    array_device = types.SimpleNamespace(stream=7)
    gpu = types.SimpleNamespace(
        array_device=array_device,
        driver=driver,
        side_stream=SIDE,
        event=EVENT,
        host_mark=np.zeros(1, np.int32),
        write_mark=lambda stream, mark: None,
        pin_pages=lambda address, nbytes: None,
    )
    gpu.set_current_gpu = lambda: None
    rank = types.SimpleNamespace(
        pending_operations=[],
        command_number=5,
        control=types.SimpleNamespace(valid_flags=np.ones(16, np.int32)),
        spans_hosts=False,
        has_peer_died=lambda: False,
        barriers=types.SimpleNamespace(last_failed_command=0, check_cancelled=lambda: None),
    )
    sys.modules["nccl"], sys.modules["nccl.bindings"] = types.ModuleType("nccl"), types.ModuleType("nccl.bindings")
    sys.modules["nccl.bindings"].nccl = None
    communicator = xla_communicator.XlaCommunicator(rank, gpu)
    comm = types.SimpleNamespace(abort=lambda: calls.append("abort"), _comm=COMM)
    connection = communicator._connection
    connection._set_current_comm(connection._attempt, comm)
    connection.generation = 1
    return communicator


def launch(program, communicator, collectives, *arguments, shape=(3,), times=1):
    """Return the program's results, the error, and the calls."""
    import jax

    calls.clear()
    results, end = [], ""
    try:
        with collectives.use_communicator(communicator, shape, times):
            results = jax.block_until_ready(program(*arguments))
    except (RuntimeError, ValueError) as error:
        end = f"{type(error).__name__}: {str(error).splitlines()[0]}; "
    return f"{[np.asarray(result).tolist() for result in results]}; {end}{calls}"


def reduce_once():
    """Reduce an array three times: normally, with an error of NCCL, and on an aborted connection."""
    import jax

    communicator, collectives = connect(), FfiCollectives(nccl_call_mode="native", op="avg")

    def program(value, gradient):
        (total,), is_valid = collectives.trace_finish([gradient])
        return jax.numpy.where(is_valid != 0, value + total, value), is_valid

    program = jax.jit(program, donate_argnums=0)
    gradient = np.arange(3, dtype="float32")

    def reduce(**options):
        print(launch(program, communicator, collectives, jax.numpy.ones(3, "float32"), gradient, **options))

    reduce()
    reduce(times=2)
    codes.append(3)
    reduce()
    reduce()
    communicator._watchdog.abort()
    reduce()
    try:
        program(jax.numpy.ones(3, "float32"), gradient)
    except Exception as error:
        print("outside:", "called outside of a launch" in str(error))


def reduce_chunks():
    """Reduce arrays of several dtypes, one of them started early; then with a layout that the ranks have not agreed on."""
    import jax
    import jax.numpy as jnp

    communicator, collectives = connect(), FfiCollectives(nccl_call_mode="native")

    def program(first, second, third):
        first, token = collectives.trace_start(first, np.int32(0))
        arrays, is_valid = collectives.trace_finish([second, third], [first], token)
        return *arrays[:2], is_valid

    program = jax.jit(program)
    arguments = jnp.ones(3, "float32"), jnp.ones((2, 2), "float32"), jnp.ones(1, "bfloat16")
    print(launch(program, communicator, collectives, *arguments, shape=(8,)))
    codes.append(3)
    print(launch(program, communicator, collectives, *arguments, shape=(8,)))
    print(launch(jax.jit(program), communicator, collectives, *(argument[:1] for argument in arguments), shape=(8,)))


def reduce_in_loop():
    """Reduce ten times in a launch; then again, with an error at the fourth."""
    import jax

    communicator, collectives = connect(), FfiCollectives(nccl_call_mode="native")

    def program(array):
        def body(state, _):
            array, i, n = state
            (total,), is_valid = collectives.trace_finish([array], extra_operands=[i])
            return (jax.numpy.where(is_valid != 0, total, array), i + 1, n + is_valid), None

        return jax.lax.scan(body, (array, 0, 0), None, length=10)[0]

    program = jax.jit(program)
    for codes[:] in ([], [0, 0, 0, 3]):
        text = launch(program, communicator, collectives, np.ones(3, "float32"), times=10)
        print(text.rpartition("; ")[0], sum("of 7" in call for call in calls))


def read_traits():
    """Print the handlers' declarations as XLA reads them."""
    from synkhronos.devices.jax.xla_ffi import _METADATA, CallFrame, _Api, _Extension, _Metadata

    library = nccl_handlers.register_handlers()
    for name in (nccl_handlers.START_TARGET, nccl_handlers.FINISH_TARGET):
        metadata = _Metadata(struct_size=ctypes.sizeof(_Metadata))
        extension = _Extension(ctypes.sizeof(_Extension), _METADATA, None, ctypes.pointer(metadata))
        api = _Api(struct_size=ctypes.sizeof(_Api))
        frame = CallFrame(struct_size=ctypes.sizeof(CallFrame), api=ctypes.pointer(api))
        frame.extension = ctypes.addressof(extension)
        handler = getattr(library, name)
        handler.restype = ctypes.c_void_p
        print(name, handler(ctypes.byref(frame)), metadata.traits)
