"""Fixtures of all tests: flags of the graph library, ranks, and checks that nothing is left.

The environment variable SYNKHRONOS_TEST_DEVICE says where functions compute whose tests don't say it themselves:

====  ===============================================================================
host  NumPy arrays, the graph library's own compiler (by default)
jax   JAX arrays on the CPU, compiled by XLA
gpu   GPUs, one a rank: JAX arrays for PyTensor, GpuArrays for Theano; tests for more ranks than GPUs are left out
====  ===============================================================================
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

DEVICE = os.environ.get("SYNKHRONOS_TEST_DEVICE", "host")
assert DEVICE in ("host", "jax", "gpu"), DEVICE

# Containers often forbid Python to keep what it compiles.  Tests start thousands of processes, and each would compile the
# library anew: up to half of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The libraries read these when they are imported.  Python's linkers compile in milliseconds; tests that are about a
# compiler ask for its mode.  PyTensor's rewrites take as long as all that comes after them: its functions are computed
# as they are written, but in tests that ask for the fixture `rewrites` or for a mode.  Theano has its rewrites
# everywhere.  traceback__limit=0: PyTensor would record a stack trace for each variable, and pytest's stacks are deep.
# Tests of synkhronos.compat look at what its rewrites and PyTensor's own make, and the zoo's networks compute for longer
# than their rewrites take; "linker" and "optimizer" are then PyTensor's defaults, for what asks for its default mode.
PLAIN, REWRITTEN = ["mode=Mode", "linker=py", "optimizer=None"], ["mode=FAST_COMPILE", "linker=auto", "optimizer=o4"]
NAMED = " ".join(word for word in sys.argv if not word.startswith("--ignore"))
MODES = {
    "host": REWRITTEN if "compat_checks" in NAMED or "check_zoo" in NAMED else PLAIN,
    "jax": ["mode=JAX"],
    "gpu": ["mode=FAST_COMPILE"],
}
for variable, flags in {
    "PYTENSOR_FLAGS": ["traceback__limit=0", *MODES[DEVICE]],
    "THEANO_FLAGS": [
        "blas.ldflags=",
        "traceback.limit=0",
        # Not all that Theano does on GPUs has a version for Python's linker.
        *(["optimizer=fast_compile", "dnn.enabled=False"] if DEVICE == "gpu" else ["mode=FAST_COMPILE"]),
    ],
}.items():
    given = [flag for flag in os.environ.get(variable, "").split(",") if flag]
    named = {flag.split("=")[0] for flag in given}
    os.environ[variable] = ",".join(given + [flag for flag in flags if flag.split("=")[0] not in named])

if DEVICE == "host" and importlib.util.find_spec("theano") and "compiledir" not in os.environ["THEANO_FLAGS"]:
    # Before a process compiles, it looks at all that its user has ever compiled: seconds, where that is thousands of
    # modules.  These are what tests compile, the same each time.
    os.environ["THEANO_FLAGS"] += f",base_compiledir={Path.home() / '.theano' / 'synkhronos-tests'}"

if DEVICE != "gpu":
    # What LLVM makes of XLA's code is not looked at on the CPU, and takes a third of its compiling.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # What XLA has compiled is kept for the other ranks, programs and runs, which ask for the same: half of JAX' tests.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "synkhronos-tests"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Theano imports mpi4py where that is installed, and this process would map MPI's memory and open its sockets.
os.environ.setdefault("MPI4PY_RC_INITIALIZE", "0")

if DEVICE == "gpu" and "PYTEST_XDIST_WORKER" in os.environ:
    # Or each of pytest's processes would wait for the others' compilers.
    folder = os.path.join(tempfile.gettempdir(), "synkhronos-theano", os.environ["PYTEST_XDIST_WORKER"])
    os.environ["THEANO_FLAGS"] += f",base_compiledir={folder}"

if DEVICE == "gpu":
    # Tests compare with products in full float32; what the library does by default is in test_gpu.py.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    # Some tests start programs that need room on the same GPUs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import gc
import signal

import pytest
from hypothesis import HealthCheck, settings
from library import COMPILER, HOSTS, UNCOMPILED, fork_ranks, package
from paths import SUPPORT
from system import find_leaked_names, list_shared_names

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices import JAX

# A shell starts what it puts into the background with interrupts ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if DEVICE != "host":
    # These start programs of their own, which compute where they say.
    collect_ignore_glob = [
        f"*/test_{name}.py"
        for name in (
            "docs",
            "faults",
            "footprint",
            "hosts_faults",
            "interrupts",
            "binding",
            "launch",
            "launch_faults",
            "launch_hosts",
            "launch_messages",
            "launch_restart",
            "launch_resume",
            "launch_signals",
            "model",
            "notebook",
            "platoon",
            "security",
            "soak",
            "stop",
        )
    ]

settings.register_profile(
    "synkhronos",
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    # XLA compiles each function anew for each shape.
    max_examples=40 if DEVICE == "host" else 6,
)
settings.load_profile("synkhronos")


def pytest_runtest_setup(item):
    """Leave out tests of several hosts where MPI is missing."""
    if item.get_closest_marker("hosts"):
        from hosts import has_mpi

        if not has_mpi():
            pytest.skip("needs mpi4py and mpirun: pip install synkhronos[hosts]")


class ReusedRanks:
    """Ranks that are kept for the next test that wants as many: where XLA was used, workers take a second to start."""

    session = None

    def fork(self, n, **kwargs):
        if kwargs or not self.usable(n):
            self.close()
            fork_ranks(n, **kwargs)
            self.session = None if kwargs else ranks.session()
        return n

    def usable(self, n):
        session = self.session
        if session is None or session.close_reason is not None or session.size != n:
            return False
        gc.collect()  # what the last test has made
        try:
            session.send_releases()
        except synk.WorkerError:
            return False
        return True

    def close(self):
        if self.session is not None:
            self.session.close()
            self.session = None


reused_ranks = ReusedRanks()


@pytest.fixture
def fork(request):
    """Give ``fork(n, **kwargs)``, and close the ranks after the test.

    Not on other devices than the host: there the next test may have them, unless it is marked ``new_ranks``.
    """
    if (DEVICE == "host" and not HOSTS) or request.node.get_closest_marker("new_ranks"):
        yield fork_ranks
        synk.close()
    else:
        yield reused_ranks.fork
        if reused_ranks.session is None:
            synk.close()


@pytest.fixture(scope="module")
def compiler():
    """Have Theano use its C++ compiler in a module's tests."""
    with config(cxx=COMPILER):
        yield


@pytest.fixture
def uncompiled():
    """Start new processes without Theano's C++ compiler, which this process does not use either."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in UNCOMPILED.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def rewrites():
    """Have functions be rewritten as in the mode FAST_COMPILE in a module's tests, where these run on the host."""
    with config(**({"mode": "FAST_COMPILE"} if DEVICE == "host" else {})):
        yield


@contextlib.contextmanager
def config(**values):
    """Set values of the library's configuration for a while."""
    before = {name: getattr(package.config, name) for name in values}
    for name, value in values.items():
        setattr(package.config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(package.config, name, value)


@pytest.fixture(autouse=True)
def close_reused_ranks(request):
    """End kept ranks for tests that don't ask for them."""
    if "fork" not in request.fixturenames or request.node.get_closest_marker("new_ranks"):
        reused_ranks.close()


@pytest.fixture(scope="module")
def no_ranks():
    """End what other modules' tests have kept, for a module that forks its own ranks."""
    gc.collect()  # a cycle of an earlier test's must not be found in the middle of this one's
    reused_ranks.close()


@pytest.fixture(scope="module", params=[2] if DEVICE == "jax" else [1, 3])
def n_ranks(request, no_ranks):
    """Fork 1 and 3 ranks for all tests of a module, and yield the number.

    One has nobody to meet, and 3 do all that 2 do: split unevenly, and meet in more than one pair.
    """
    fork_ranks(request.param)
    yield request.param
    synk.close()


@pytest.fixture(scope="module")
def two_ranks(no_ranks):
    """Fork 2 ranks for all tests of a module."""
    fork_ranks(2)
    yield 2
    synk.close()


@pytest.fixture(autouse=True, scope="module")
def end_template():
    """End what started programs for a module's tests: others' look at all children of this process."""
    yield
    if "faults.harness" in sys.modules:
        sys.modules["faults.harness"].Template.end()


@pytest.fixture(autouse=True, scope="module")
def end_hosts():
    """End the hosts that a module's tests have kept."""
    yield
    if "hosts" in sys.modules:
        sys.modules["hosts"].end()


@pytest.fixture(autouse=True, scope="module")
def check_xla_not_started(request):
    """Check that on the host no test starts XLA: workers would be no copies of this process any more, and start slowly.

    But in the folders whose modules run in processes of their own.
    """
    yield
    assert DEVICE != "host" or SUPPORT in request.path.parents or not JAX.is_started()


@pytest.fixture(autouse=True, scope="session")
def check_no_leaks():
    """Check that the whole run leaves no name in /dev/shm."""
    before = list_shared_names()  # of a run beside this one, or of one that was killed
    yield
    synk.close()
    assert not find_leaked_names(before)
