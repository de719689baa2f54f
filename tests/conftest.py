"""Fixtures of all tests: flags of the graph library, and ranks.

The environment variable SYNKHRONOS_TEST_DEVICE sets the device of functions in tests that don't choose one:

====  ===============================================================================
host  NumPy arrays, the graph library's own compiler (by default)
jax   JAX arrays on the CPU, compiled by XLA
gpu   GPUs, one for each rank: JAX arrays for PyTensor, GpuArrays for Theano; tests of more ranks than GPUs are skipped
====  ===============================================================================
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

#: Folders of tests that must run in processes of their own; run.py starts these.
OWN_PROCESS_FOLDERS = {"compat", "lasagne_demos", "update_rules_optax"}
DEVICE = os.environ.get("SYNKHRONOS_TEST_DEVICE", "host")
assert DEVICE in ("host", "jax", "gpu"), DEVICE

# Containers often disable Python's cache of compiled modules.  Tests start thousands of processes, and each would spend
# up to half of its start on compiling the library.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The libraries read these when they are imported.  Python's linkers compile in milliseconds; tests of a compiler choose
# its mode.  PyTensor's rewrites take half of a compilation, so functions are not rewritten, except in tests that use the
# fixture `rewrites` or choose a mode.  Theano's rewrites are always on.  traceback__limit=0: PyTensor would record a stack
# trace for each variable, and pytest's stacks are deep.
MODES = {
    "host": ["mode=Mode", "linker=py", "optimizer=None"],
    "jax": ["mode=JAX"],
    "gpu": ["mode=FAST_COMPILE"],
}
for variable, flags in {
    # -O0 and -g0: g++'s optimizations and debug information would take a fifth or more of the time in which tests of C code
    # compile.
    "PYTENSOR_FLAGS": ["traceback__limit=0", "gcc__cxxflags=-O0 -g0", *MODES[DEVICE]],
    "THEANO_FLAGS": [
        "blas.ldflags=",
        "traceback.limit=0",
        "gcc.cxxflags=-O0 -g0",
        # Some of Theano's Ops on GPUs can't run with Python's linker.
        *(["optimizer=fast_compile", "dnn.enabled=False"] if DEVICE == "gpu" else ["mode=FAST_COMPILE"]),
    ],
}.items():
    user_flags = [flag for flag in os.environ.get(variable, "").split(",") if flag]
    user_names = {flag.split("=")[0] for flag in user_flags}
    os.environ[variable] = ",".join(user_flags + [flag for flag in flags if flag.split("=")[0] not in user_names])

if DEVICE == "host" and importlib.util.find_spec("theano") and "compiledir" not in os.environ["THEANO_FLAGS"]:
    # Theano scans its whole cache before it compiles, which takes seconds with thousands of modules.  This cache
    # holds only the modules of tests.
    os.environ["THEANO_FLAGS"] += f",base_compiledir={Path.home() / '.theano' / 'synkhronos-tests'}"

if DEVICE != "gpu":
    # LLVM's optimizations take a third of XLA's compile time, and no test on the CPU depends on them.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # A persistent cache of compiled functions, shared by ranks, programs and runs, halves the time of JAX's tests.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "synkhronos-tests"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Theano imports mpi4py where that is installed, and this process would map MPI's memory and open its sockets.
os.environ.setdefault("MPI4PY_RC_INITIALIZE", "0")

if DEVICE == "gpu" and "PYTEST_XDIST_WORKER" in os.environ:
    # Otherwise pytest's processes would wait for each other's compilers.
    folder = os.path.join(tempfile.gettempdir(), "synkhronos-theano", os.environ["PYTEST_XDIST_WORKER"])
    os.environ["THEANO_FLAGS"] += f",base_compiledir={folder}"

if DEVICE == "gpu":
    # Tests expect products in full float32; test_gpu.py tests the default precision.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    # Some tests start programs that need memory on the same GPUs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import gc
import signal

import pytest
from hypothesis import HealthCheck, settings
from library import COMPILER, ENVIRONMENT_WITHOUT_COMPILER, HOSTS, NAME, fork_ranks, package

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices import JAX

if package.__name__ == "pytensor":
    from pytensor.link.c.op import ExternalCOp as COp
else:
    from theano.gof.op import COp


def load_c_code_once(op, files, load=COp.load_c_code, loaded={}):  # noqa: B006 - a cache
    """Copy an Op's C code from the first Op of its class: each new DimShuffle would read and parse a file."""
    key = type(op), tuple(files)
    if key not in loaded:
        load(op, files)
        loaded[key] = op.func_codes, op.code_sections
    op.func_codes, op.code_sections = list(loaded[key][0]), dict(loaded[key][1])


COp.load_c_code = load_c_code_once

# Shells ignore SIGINT in background jobs, and nohup ignores SIGHUP; programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile(
    "synkhronos",
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    # XLA compiles each function anew for each shape.
    max_examples=40 if DEVICE == "host" else 6,
)
settings.load_profile("synkhronos")


def pytest_collection_modifyitems(items):
    """Deselect tests whose programs choose their own device, and refuse tests of compat beside others.

    The latter change what ``import theano`` finds, and may start XLA.
    """
    if DEVICE != "host":
        items[:] = [item for item in items if not item.get_closest_marker("starts_programs")]
    folders = {item.path.parent.name for item in items}
    if folders & OWN_PROCESS_FOLDERS and folders - OWN_PROCESS_FOLDERS:
        raise pytest.UsageError(f"run {', '.join(sorted(folders & OWN_PROCESS_FOLDERS))} in a process of their own")


def pytest_collection_finish():
    """Exempt modules and tests from garbage collection: a full collection would visit all of them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Skip tests of several hosts where MPI is missing."""
    if item.get_closest_marker("hosts"):
        from hosts import has_mpi

        if not has_mpi():
            pytest.skip("needs mpi4py and mpirun: pip install synkhronos[hosts]")


class ReusedRanks:
    """Ranks that the next test with the same number reuses: with XLA, workers take a second to start."""

    session = None

    def fork(self, n, **kwargs):
        if kwargs or not self.can_reuse(n):
            self.close()
            fork_ranks(n, **kwargs)
            self.session = None if kwargs else ranks.get_session()
        return n

    def can_reuse(self, n):
        session = self.session
        if session is None or session.close_reason is not None or session.size != n:
            return False
        gc.collect()  # objects of the last test
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
    """Yield ``fork(n, **kwargs)``, and close the ranks after the test.

    On devices other than the host the next test reuses the ranks, unless it is marked ``new_ranks``.
    """
    if (DEVICE == "host" and not HOSTS) or request.node.get_closest_marker("new_ranks"):
        yield fork_ranks
        synk.close()
    else:
        yield reused_ranks.fork
        if reused_ranks.session is None:
            synk.close()


@pytest.fixture
def two_ranks_per_test(fork):
    """Fork 2 ranks for one test, by `fork`; return the number."""
    return fork(2)


@pytest.fixture
def compiler():
    """Let the library use its C++ compiler."""
    with config(cxx=COMPILER):
        yield


@pytest.fixture
def without_compiler():
    """Start new processes without Theano's C++ compiler, which this process does not use either."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT_WITHOUT_COMPILER.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def rewrites():
    """Rewrite functions as in the mode FAST_COMPILE in a module's tests, if they run on the host."""
    with config(**({"mode": "FAST_COMPILE"} if DEVICE == "host" else {})):
        yield


@contextlib.contextmanager
def config(**values):
    """Set values of the library's configuration within the context."""
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
    """Close reused ranks before a test that doesn't use them."""
    if "fork" not in request.fixturenames or request.node.get_closest_marker("new_ranks"):
        reused_ranks.close()


@pytest.fixture(scope="module")
def no_ranks():
    """Close reused ranks before a module that forks its own."""
    gc.collect()  # otherwise garbage of an earlier test could be collected during a test
    reused_ranks.close()


@pytest.fixture(scope="module", params=[2] if DEVICE == "jax" else [3] if NAME == "theano" else [1, 3])
def n_ranks(request, no_ranks):
    """Fork 1 and 3 ranks for all tests of a module, and yield the number; 3 alone with Theano.

    One rank has no peer; 3 ranks cover 2: they split rows unevenly, and have more than one pair.
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
    """End the template process of a module's programs: tests of other modules list all child processes."""
    yield
    if harness := sys.modules.get("faults.harness"):
        harness.Template.end()
        harness.check_delays()


@pytest.fixture(autouse=True, scope="module")
def end_hosts():
    """End the hosts that a module's tests have left running."""
    yield
    if "hosts" in sys.modules:
        sys.modules["hosts"].end()


@pytest.fixture(autouse=True, scope="module")
def check_xla_not_started(request):
    """Check that no test on the host starts XLA: workers could then not be forked, and would start slowly.

    Folders that run in processes of their own are exempt.
    """
    yield
    assert DEVICE != "host" or request.path.parent.name in OWN_PROCESS_FOLDERS or not JAX.has_unforkable_runtime()


@pytest.fixture(autouse=True, scope="session")
def close_last_ranks():
    """Close the ranks that the last test has left."""
    yield
    synk.close()
