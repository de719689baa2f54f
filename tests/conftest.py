"""What all tests share: one graph library, ranks that are forked when asked for, and nothing left behind.

The environment variable SYNKHRONOS_TEST_DEVICE says where functions compute whose tests don't say it themselves:

====  ===============================================================================
host  NumPy arrays, the graph library's own compiler (by default)
jax   JAX arrays on the CPU, compiled by XLA
gpu   JAX arrays on GPUs, one a rank; tests for more ranks than there are GPUs are left out
====  ===============================================================================
"""

import os

DEVICE = os.environ.get("SYNKHRONOS_TEST_DEVICE", "host")
assert DEVICE in ("host", "jax", "gpu"), DEVICE

# The libraries read these when they are imported.  Python's linkers compile in milliseconds; tests that are about a
# compiler ask for its mode.
for variable, flags in {
    "PYTENSOR_FLAGS": ["mode=JAX" if DEVICE == "jax" else "mode=FAST_COMPILE"],
    "THEANO_FLAGS": ["blas.ldflags=", "mode=FAST_COMPILE"],
}.items():
    given = [flag for flag in os.environ.get(variable, "").split(",") if flag]
    named = {flag.split("=")[0] for flag in given}
    os.environ[variable] = ",".join(given + [flag for flag in flags if flag.split("=")[0] not in named])

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

import synkhronos as synk

# A shell starts what it puts into the background with interrupts ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "synkhronos", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40
)
settings.load_profile("synkhronos")


def shared_memory_names():
    """Return the names in /dev/shm that look like the library's."""
    return [name for name in os.listdir("/dev/shm") if "synkhronos" in name]


def fork_ranks(n, **kwargs):
    """Fork ranks on the device under test."""
    if DEVICE == "gpu" and n > synk.get_n_gpu():
        pytest.skip(f"needs {n} GPUs")
    return synk.fork(n, use_gpu=DEVICE == "gpu", **kwargs)


@pytest.fixture
def fork():
    """Give ``fork(n, **kwargs)``, and close the ranks after the test."""
    yield fork_ranks
    synk.close()


@pytest.fixture(scope="module", params=[1, 2, 3])
def n_ranks(request):
    """Fork 1, 2 and 3 ranks for all tests of a module, and yield the number."""
    gc.collect()  # a cycle of an earlier test's must not be found in the middle of this one's
    fork_ranks(request.param)
    yield request.param
    synk.close()


@pytest.fixture(scope="module")
def two_ranks():
    """Fork 2 ranks for all tests of a module."""
    fork_ranks(2)
    yield 2
    synk.close()


@pytest.fixture(autouse=True, scope="session")
def nothing_left():
    """Check that the whole run leaves no name in /dev/shm."""
    yield
    synk.close()
    assert not shared_memory_names()
