"""GPUs of the ranks, memory in use, precision, and copies of arrays to host memory.

Run the tests of GPUs by ``python3 run.py test --device gpu --here`` on a machine with two GPUs or more, with PyTensor or
with Theano.
"""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from gpu_commands import ON_GPUS, RNG, needs_jax, needs_real_gpus
from library import GPU_DEVICE, NAME, read_results, shared
from library import tensor as T

import synkhronos as synk
from synkhronos import ranks
from synkhronos.engines.lazy import Result
from synkhronos.graph_libraries import get_library
from synkhronos.ranks import Command

pytestmark = ON_GPUS


def run_program(code, **environment):
    """Run a program in a new process; return its output."""
    path = os.pathsep.join([str(Path(synk.__file__).parent.parent), *sys.path])
    variables = {name: value for name, value in os.environ.items() if name != "JAX_DEFAULT_MATMUL_PRECISION"}
    head = f"import numpy as np, synkhronos as synk, {NAME} as package, {NAME}.tensor as T"
    done = subprocess.run(
        [sys.executable, "-c", f"{head}\n{textwrap.dedent(code)}"],
        env={**variables, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class GetGpu(Command):
    """Command that returns the GPU of each rank."""

    def run(self, rank):
        from cuda.core import Device

        GPU_DEVICE.gpu_context.set_current_gpu()
        return rank.all_gather(
            (GPU_DEVICE.owns(GPU_DEVICE.empty((1,), np.dtype("float32"))), str(Device(0).pci_bus_id))
        )


def get_gpus():
    return ranks.get_session().run(GetGpu())


@pytest.mark.new_ranks
def test_fork_gives_each_rank_a_gpu(fork):
    fork(2)
    first = get_gpus()
    assert all(is_on_gpu for is_on_gpu, _ in first)
    assert len({bus for _, bus in first}) == 2
    synk.close()
    fork(2, master_rank=1)  # the master cannot change its GPU
    assert get_gpus() == first[::-1]


def test_fork_makes_a_rank_for_each_gpu():
    printed = run_program("""
        n = synk.fork()
        x, w = T.dvector("x"), package.shared(np.ones(3), "w")
        f = synk.function([x], (x.sum(), "sum"), updates=[(w, w * 2)])
        print(n == synk.get_n_gpu(), float(f(np.ones(12))))
        synk.all_reduce(w)
        from synkhronos.devices import get_array_device
        print(get_array_device(w.container.storage[0]).name, get_array_device(w.container.storage[0]).is_on_gpu)
        synk.close()
    """)
    assert printed.split() == ["True", "12.0", GPU_DEVICE.name, "True"]


@needs_jax
@pytest.mark.parametrize("first", ["pass", "import jax"])
def test_fork_with_use_gpu_false_uses_no_gpu(first):
    printed = run_program(f"""
        {first}
        synk.fork(2, use_gpu=False)
        x = T.dvector("x")
        print(float(synk.function([x], (x.sum(), "sum"), mode="JAX")(np.ones(4))))
        import jax
        print(jax.devices()[0].platform)
        synk.close()
    """)
    assert printed.split() == ["4.0", "cpu"]


@needs_jax
@needs_real_gpus
def test_fork_on_gpus_after_a_fork_on_cores():
    printed = run_program("""
        import jax
        for use_gpu in (False, True):
            synk.fork(2, use_gpu=use_gpu)
            print(jax.config.jax_platforms)
            synk.close()
        print(jax.devices()[0].platform)
    """)
    assert printed.split() == ["cpu", "None", "gpu"]


def test_cuda_visible_devices_order_is_kept():
    printed = run_program(
        """
        import os
        synk.fork(2)
        from cuda.core import Device
        Device(0).set_current()
        mine = str(Device(0).pci_bus_id)
        synk.close()
        import pynvml
        pynvml.nvmlInit()
        second = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(1)).busId
        second = second.decode() if isinstance(second, bytes) else second
        print(mine.lower()[-10:] == second.lower()[-10:], os.environ["CUDA_VISIBLE_DEVICES"])
        """,
        CUDA_VISIBLE_DEVICES="1,0",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
    )
    assert printed.split() == ["True", "1,0"]


def test_fork_refuses_cuda_in_use():
    printed = run_program("""
        from cuda.core import Device
        Device(0).set_current()
        try:
            synk.fork(2)
        except RuntimeError as error:
            print(error)
        synk.fork(2, use_gpu=False)
        synk.close()
    """)
    assert "has already started CUDA" in printed


def test_fork_refuses_more_ranks_than_gpus():
    with pytest.raises(ValueError, match="each rank needs one"):
        synk.fork(synk.get_n_gpu() + 1)


class GetMemoryInUse(Command):
    """Command that returns each rank's memory in use, on its GPU and in its process."""

    def run(self, rank):
        gc.collect()
        gpu_nbytes = 0
        if NAME == "pytensor":  # pygpu doesn't report how much of its pool is in use
            import jax

            stats = jax.devices()[0].memory_stats()  # None for the CPU, which is each fake GPU
            gpu_nbytes = stats["bytes_in_use"] if stats else sum(array.nbytes for array in jax.live_arrays())
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return rank.all_gather((gpu_nbytes, resident))


def test_memory_stays_flat_over_a_thousand_calls(two_ranks_per_test):
    x, s = T.fmatrix("x"), shared(np.zeros((1, 64), "float32"), "s")
    w = shared(np.ones((64, 64), "float32"), "w")
    loss = (T.tanh(T.dot(x, w)).sum(axis=1) + s.sum()).mean()
    f = synk.function([x], [loss, (x, None)], updates=[(w, w * np.float32(0.999))], sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.ones((64, 64), "float32"))
    data = synk.data(RNG.normal(size=(1000, 64)).astype("float32"))

    def calls(count):
        for i in range(count):
            result, _ = f(data, batch=RNG.integers(0, 1000, 200), batch_s=[[i % 8, 1], [0, i % 8]])
            synk.all_reduce(w)
            if i % 10 == 0:
                float(result)
                synk.gather(w)
                synk.broadcast(w, nccl=False)
        read_results(result)

    calls(600)  # results of unread calls are dropped some hundreds at a time
    before = ranks.get_session().run(GetMemoryInUse())
    calls(1000)
    after = ranks.get_session().run(GetMemoryInUse())
    for (new_gpu_nbytes, resident), (gpu_nbytes, resident_then) in zip(after, before, strict=True):
        # Unread outputs are cached for at most 256 calls, here of 100 rows on each rank.
        assert new_gpu_nbytes - gpu_nbytes <= 260 * 100 * 64 * 4
        assert resident - resident_then < 64 << 20


def test_closed_ranks_leave_no_page_locked_memory(fork):
    # Locked pages that were unmapped would make the next lock of the same address fail.
    for _ in range(3):
        fork(2)
        x = T.dmatrix("x")
        f = synk.function([x], (x, "gather"))
        for n in (10, 1000, 100_000):
            data = synk.data(RNG.normal(size=(n, 3)))
            np.testing.assert_array_equal(f(data), data)
            np.testing.assert_array_equal(f(data, batch=[3, 1]), data[[3, 1]])
            del data
        synk.close()


@needs_jax
@needs_real_gpus
def test_matmul_precision_is_tf32_by_default():
    code = """
        synk.fork(2)
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(512, 512)).astype("float32"), rng.normal(size=(512, 512)).astype("float32")
        x, y = T.fmatrix("x"), T.fmatrix("y")
        product = np.asarray(synk.function([x], (T.dot(x, y), "gather"), bcast_inputs=[y])(a, b))
        exact = a.astype("float64") @ b.astype("float64")
        print(product.dtype, np.abs(product - exact).max() / np.abs(exact).max())
        synk.close()
    """
    for variables, least, most in (({}, 1e-5, 1e-2), ({"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, 0, 1e-6)):
        dtype, error = run_program(code, **variables).split()
        assert dtype == "float32"
        assert least <= float(error) < most


@needs_jax
@pytest.mark.parametrize("width", [None, 3])
def test_scatter_add_of_many_rows_to_few_effects_equals_numpy(width, two_ranks_per_test):
    places, rows = 50, 300_000
    effects = (T.dvector if width is None else T.dmatrix)("effects")
    weights, index = (T.dvector if width is None else T.dmatrix)("weights"), T.ivector("index")
    f = synk.function(
        [index, weights], (T.grad((effects[index] ** 2 * weights).sum(), effects), "sum"), bcast_inputs=[effects]
    )
    shape = () if width is None else (width,)
    picked, weight = RNG.integers(0, places, rows).astype("int32"), RNG.random((rows, *shape))
    values = RNG.random((places, *shape))
    expected = np.zeros_like(values)
    np.add.at(expected, picked, 2 * values[picked] * weight)
    np.testing.assert_allclose(f(picked, weight, values), expected, rtol=1e-9)


@needs_jax
@needs_real_gpus
def test_waiting_for_an_array_waits_for_the_gpu(two_ranks_per_test):
    w = shared(np.full((4000, 4000), 1 / 4000, "float32"), "w")
    multiply = synk.function([], [], updates=[(w, w.dot(w))])
    for _ in range(20):
        multiply()  # takes longer on the GPU than in the host
    GPU_DEVICE.wait([get_library(w).borrow_value(w)])
    driver = GPU_DEVICE.gpu_context.driver
    assert driver.cuStreamQuery(GPU_DEVICE.stream) == (driver.CUresult.CUDA_SUCCESS,)


@needs_jax
def test_waiting_for_a_deleted_array_raises_runtime_error(two_ranks_per_test):
    array = GPU_DEVICE.from_numpy(np.ones(3))
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        GPU_DEVICE.wait([array])


@needs_jax
@needs_real_gpus
def test_waiting_for_an_array_on_the_cpu_waits(two_ranks_per_test):
    import jax

    square = jax.jit(lambda matrix: matrix @ matrix)
    array = square(jax.device_put(np.full((2000, 2000), 1 / 2000), jax.devices("cpu")[0]))
    GPU_DEVICE.wait([array])
    assert array.is_ready()


@needs_jax
def test_results_are_fetched_from_the_gpu_once(two_ranks_per_test):
    x = T.dvector("x")
    result = synk.function([x], (x * 2, "gather"))(np.arange(4.0))
    assert type(result) is Result
    assert np.asarray(result) is np.asarray(result)


@needs_jax
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5), (1 << 17,), ((1 << 17) + 1,)])
def test_results_of_any_dtype_and_size_are_fetched(shape, two_ranks_per_test):
    dtypes = ["bool", "uint8", "float16", "int32", "float64", "complex64"]
    expected = [(RNG.random(shape) * 9).astype(dtype) for dtype in dtypes]
    gpu_arrays = [GPU_DEVICE.from_numpy(array) for array in expected]
    for _ in range(2):
        fetched = GPU_DEVICE.to_numpy_many([*[array.copy() for array in gpu_arrays], 7])
        assert fetched.pop() == 7
        for array, value in zip(fetched, expected, strict=True):
            np.testing.assert_array_equal(array, value, strict=True)
        GPU_DEVICE.staging._fetch_memory.used_nbytes = 64  # as an interrupt leaves it
