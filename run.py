#!/usr/bin/env python3
"""Make the environments in .venv/ and run the demos, the tests and the tools in them.

On a machine with Python 3.11 nothing needs to be installed before:

    python3 run.py mnist     # train on MNIST, on all cores
    python3 run.py test      # the tests, with PyTensor and with Theano

    python3 run.py test --quick               # a selection that takes a minute
    python3 run.py test --all                 # all tests: also PyMC's, slow ones, and those that need several hosts,
                                              # kill processes or compile for minutes
    python3 run.py test --env bambi           # those of Bambi's models and of nutpie, in an environment of their own
    python3 run.py test -m faults             # only those that kill, stop and interrupt processes
    python3 run.py test --device jax          # the tests on JAX arrays, compiled by XLA for the CPU
    python3 run.py test --device gpu --here   # the tests on GPUs, with this Python and the packages that it has

There are three environments, because PyTensor needs NumPy 2 and Theano 1.0.5 needs NumPy 1.23, and because PyMC
says which PyTensor it takes; `test --all` makes one more if it finds a newer Python. They are made at the first use and
kept; pip runs again only when pyproject.toml changes or a command needs more packages.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
ENVIRONMENTS = ROOT / ".venv"
NO_ROOM = (
    f"no space left on the disk: the three environments in {ENVIRONMENTS} need about 2 GB, and pip as much in TMPDIR."
)
#: Causes of a failed installation, and parts of the messages of pip or venv.
CAUSES = {
    NO_ROOM: ["No space left on device", "Disk quota exceeded"],
    "no network: pip could not reach the package index. With one, run this again; without, use a Python that has the "
    "packages (python3 run.py test --here).": [
        "(from versions: none)",
        "NewConnectionError",
        "Failed to establish a new connection",
        "NameResolutionError",
        "Temporary failure in name resolution",
        "ConnectTimeoutError",
        "Network is unreachable",
        "ProxyError",
    ],
    "could not make a virtual environment: on Debian or Ubuntu the package python3-venv is missing.": [
        "No module named ensurepip",
        "ensurepip is disabled",
    ],
}
OLDEST_PYTHON = (3, 11)
# Theano 1.0.5 needs NumPy 1.23 and distutils; neither exists for Python 3.12.
NEWEST_PYTHON_FOR_THEANO = (3, 11)
# Minor versions of the Python 3 with which `test --all` runs `NEWER`, if one is installed.
NEWER_PYTHONS = (14, 13, 12)


def print_message(text: str) -> None:
    """Print a message on stderr, since the output of `env` is used as ``$(python3 run.py env theano)``."""
    print(f"run.py: {text}", file=sys.stderr, flush=True)


def make_exit(text: str) -> SystemExit:
    """Return the exception that ends run.py with a message."""
    return SystemExit(f"run.py: {text}")


def get_python_name(version: str = sys.version) -> str:
    """Return the name of a Python with this `sys.version`, as in ``Python 3.11``."""
    return f"Python {'.'.join(version.split('.')[:2])}"


# ---------------------------------------------------------------------------------------------------------
# Commands in other processes
# ---------------------------------------------------------------------------------------------------------


def get_command_variables() -> dict[str, str]:
    """Return the environment variables of the commands."""
    variables = dict(os.environ)
    # Containers often disable Python's cache of compiled modules, and each command would compile them again.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    flags = variables.get("THEANO_FLAGS", "")
    if "blas.ldflags" not in flags:
        # Without it `import theano` asks numpy.distutils for a BLAS, which fails on NumPy 1.23.
        variables["THEANO_FLAGS"] = f"{flags},blas.ldflags=".lstrip(",")
    return variables


def run_command(command: Sequence[object], heading: str | None = None, **variables: str) -> int:
    """Run a command in the repository's root and return its exit status; put a heading before each line of output."""
    words = [str(word) for word in command]
    print_message(shlex.join(words) if heading is None else f"{heading}: {shlex.join(words)}")
    output, errors = (None, None) if heading is None else (subprocess.PIPE, subprocess.STDOUT)
    interrupted = False
    with subprocess.Popen(
        words, cwd=ROOT, env={**get_command_variables(), **variables}, stdout=output, stderr=errors
    ) as process:
        while process.returncode is None:
            try:
                for line in process.stdout or []:
                    print(f"{heading}: {line.decode(errors='replace')}", end="", flush=True)
                process.wait()
            except KeyboardInterrupt:
                # The terminal sent Ctrl-C to the command, too, which cleans up and ends, or continues.
                interrupted = True
    if interrupted:
        raise SystemExit(130)
    # A signal's number is negative here; a shell would return 128 plus the number.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def run_installer(command: Sequence[object]) -> None:
    """Run a command that makes or fills an environment; if it fails, end with a line that names the cause."""
    words = [str(word) for word in command]
    print_message(shlex.join(words))
    variables = {**get_command_variables(), "PYTHONWARNINGS": "ignore"}  # setuptools' of editable installations
    done = subprocess.run(words, cwd=ROOT, env=variables, text=True, errors="replace", capture_output=True)
    if done.returncode == 0:
        print(done.stderr, end="", file=sys.stderr)
        return
    output = done.stdout + done.stderr
    for cause, signs in CAUSES.items():
        if any(sign in output for sign in signs):
            raise make_exit(cause)
    print(output, end="", file=sys.stderr)
    raise make_exit(f"could not install the packages; the messages of {Path(words[0]).name} are above.")


def run_commands(commands: Sequence[Sequence[object]]) -> int:
    """Run all commands, and return the exit status of the first one that failed, or 0."""
    statuses = [run_command(command) for command in commands]
    return next((status for status in statuses if status != 0), 0)


# ---------------------------------------------------------------------------------------------------------
# Environments
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """A virtual environment with this package and one graph library.

    Parameters
    ----------
    name : str
        The graph library, which is also the name of its extra in pyproject.toml; a hyphen and more may follow.
    interpreter : str
        Path of the Python that makes the environment.
    """

    name: str
    interpreter: str = sys.executable

    @property
    def directory(self) -> Path:
        """Path of the environment."""
        return ENVIRONMENTS / self.name

    @property
    def python(self) -> Path:
        """Path of its Python interpreter."""
        return self.directory / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Path of the list of installed packages, a file that exists only while the environment is complete."""
        return self.directory / "synkhronos.json"

    def prepare(self, *extras: str) -> None:
        """Make the environment, or bring it up to date, with these extras of pyproject.toml."""
        if self._make_stamp(extras) == self._read_stamp():
            return
        with hold_lock(ENVIRONMENTS / "lock"):
            installed, stamp = self._read_stamp(), self._make_stamp(extras)
            if stamp == installed:  # by another run.py
                return
            if not installed:
                self._create_environment()
            # Removed meanwhile: an install that is cut short starts from nothing the next time.
            self.stamp.unlink(missing_ok=True)
            try:
                self._install_package(stamp["extras"])
            except SystemExit:
                if installed:
                    # pip failed before it changed anything, so what worked before works on without a network.
                    self._write_stamp(installed)
                raise
            self._write_stamp(stamp)

    def _make_stamp(self, extras: Sequence[str]) -> dict:
        """Return the stamp of the environment with these extras, and with the installed ones."""
        return {
            "root": str(ROOT),
            "python": read_version(self.interpreter),
            "pyproject": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
            "extras": sorted({self.name.partition("-")[0], *extras, *self._read_stamp().get("extras", [])}),
        }

    def _write_stamp(self, stamp: dict) -> None:
        self.stamp.write_text(json.dumps(stamp, indent=2) + "\n")

    def _read_stamp(self) -> dict:
        """Return the stamp of the installed packages; an empty dict if the environment has to be made anew."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        # Another Python's packages do not load here, and a moved environment imports from its old place.
        same_python = stamp["python"] == read_version(self.interpreter) and self.python.exists()
        return stamp if same_python and stamp["root"] == str(ROOT) else {}

    def _create_environment(self) -> None:
        print_message(
            f"making {self.directory.relative_to(ROOT)} with {get_python_name(read_version(self.interpreter))}"
        )
        run_installer([self.interpreter, "-m", "venv", "--without-pip", "--clear", self.directory])

    def _install_package(self, extras: Sequence[str]) -> None:
        pip = prepare_pip()
        print_message(f"installing synkhronos[{','.join(extras)}]; the first time takes a few minutes")
        package = f"{ROOT}[{','.join(extras)}]"
        # Modules are compiled when they are first imported: pip would take half of its time to compile all of them.
        run_installer([*pip, "--python", self.python, "install", "--quiet", "--no-compile", "--editable", package])


def prepare_pip() -> list[str]:
    """Return the command of the pip that fills all environments, and install it if need be."""
    directory = ENVIRONMENTS / "pip"
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    try:
        is_installed = subprocess.run([*pip, "--version"], capture_output=True).returncode == 0
    except OSError:
        is_installed = False
    if not is_installed:
        # In two steps, as venv keeps to itself why pip could not be put there.
        run_installer([sys.executable, "-m", "venv", "--without-pip", "--clear", directory])
        run_installer([pip[0], "-m", "ensurepip", "--default-pip"])
        # Python's own pip takes twice as long to choose versions; it does so where the index has no other.
        subprocess.run(
            [*pip, "install", "--quiet", "--no-compile", "--retries=0", "--upgrade", "pip"], capture_output=True
        )
    return pip


@functools.cache
def read_version(interpreter: str) -> str:
    """Return the `sys.version` of a Python; an empty string if it does not run, or lacks venv."""
    if interpreter == sys.executable:
        return sys.version
    command = [interpreter, "-c", "import ensurepip, sys, venv; print(sys.version, end='')"]
    try:
        done = subprocess.run(command, text=True, capture_output=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""  # pyenv's shims of versions that are not chosen fail


def find_newer_environment() -> Environment | None:
    """Return PyTensor's environment for the newest of `NEWER_PYTHONS` on this machine; None if there is none."""
    for minor in (minor for minor in NEWER_PYTHONS if minor > sys.version_info[1]):
        installed = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        for interpreter in filter(None, [shutil.which(f"python3.{minor}"), *map(str, installed)]):
            if read_version(interpreter).startswith(f"3.{minor}."):
                return Environment(f"{PYTENSOR.name}-3.{minor}", interpreter)
    return None


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Context that holds a lock file, so that two processes do not install into one environment at once."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_message("another run.py is installing; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


PYTENSOR = Environment("pytensor")
THEANO = Environment("theano")
# PyMC wants a PyTensor of its own choice: on Python 3.11 one that is older than the extra `pytensor` asks for.
PYMC = Environment("pymc")
# PyMC with Bambi and nutpie: PyMC uses nutpie where it is installed, and the tests of `PYMC` its own sampler.
BAMBI = Environment("bambi")
ENVIRONMENTS_BY_NAME = {environment.name: environment for environment in (PYTENSOR, THEANO, PYMC, BAMBI)}


def require_theano_python() -> None:
    """End with a message when this Python is too new for Theano."""
    if sys.version_info[:2] > NEWEST_PYTHON_FOR_THEANO:
        raise make_exit(f"Theano 1.0.5 needs Python 3.11; this is {get_python_name()}.")


def require_compiler(reason: str) -> None:
    """End with a message when C++ extension modules cannot be compiled."""
    if shutil.which("g++") is None:
        raise make_exit(f"g++ was not found: {reason}. On Debian or Ubuntu: apt-get install g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise make_exit(f"{header} was not found: {reason}. On Debian or Ubuntu: apt-get install python3-dev")


def prepare_environment(environment: Environment, *extras: str) -> Environment:
    """Return the environment with these extras installed."""
    if environment is THEANO:
        require_theano_python()
        require_compiler("Theano 1.0.5 compiles each function as C++")
    environment.prepare(*extras)
    return environment


# ---------------------------------------------------------------------------------------------------------
# The commands of run.py
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A run of pytest.

    Parameters
    ----------
    environment : Environment
    part : str
        Selection of its tests, in a word or as the user gave it; "" for most of them.
    arguments : sequence of str
        For pytest.
    device : str
        As of the option ``--device``.
    """

    environment: Environment
    part: str
    arguments: Sequence[str]
    device: str = "host"

    @property
    def name(self) -> str:
        """The environment, and what runs there."""
        return f"{self.environment.name}, {self.part}" if self.part else self.environment.name

    def run(self, report: Path, alone: bool) -> int:
        """Run the tests and return the exit status; beside other jobs, prefix each line of output with the name."""
        return self._call_pytest(report, [f"--junit-xml={report}"], None if alone else self.name)

    def retry(self, report: Path) -> int:
        """Run the failed tests once more, without other jobs, and return the exit status."""
        # Jobs of one environment run from one folder, so each has a cache of its own that names its failures.
        again = ["--last-failed", "--last-failed-no-failures=none"]
        return self._call_pytest(report, again, f"{self.name}, retry")

    def _call_pytest(self, report: Path, options: Sequence[str], heading: str | None) -> int:
        cache = ["-o", f"cache_dir={report.with_suffix('.cache')}"]
        command = [self.environment.python, "-m", "pytest", *cache, *options, *self.arguments]
        # PyTensor leaves a file per compiled function, which it removes only in processes that end normally.
        with tempfile.TemporaryDirectory(prefix="synk-", ignore_cleanup_errors=True) as folder:
            variables = {"SYNKHRONOS_TEST_DEVICE": self.device, "TMPDIR": folder}
            return run_command(command, heading, **variables)


def list_test_files(*names: str) -> list[str]:
    """Return the paths of test files: ``rows`` is tests/data_objects/test_rows.py."""
    return [str(path.relative_to(ROOT)) for name in names for path in ROOT.glob(f"tests/*/test_{name}.py")]


def list_marked_files(marker: str) -> list[str]:
    """Return the paths of test files with this marker: pytest would import all files to find a few of them."""
    files = ROOT.glob("tests/*/test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in files if f"mark.{marker}" in path.read_text())


#: Parts of the tests of packages, by folders of tests/.  Each is a job; the other folders are one more job.  Tests that
#: load large libraries, such as Numba, are apart from tests that fork: the larger a process, the longer a fork takes.
FOLDERS_OF_PARTS = {
    "engines": ("engines", "extensions", "devices"),
    "launch": ("launcher", "loading", "platoon"),
    "ranks": ("ranks", "programs", "hosts", "exchange_rules", "timelines"),
    "training": ("training",),
}
#: Tests that `test` runs on JAX arrays.
JAX_TESTS = list_test_files("fused_launch", "fused_steps", "jax", "lazy_results", "spmd_program", "spawned_workers")
#: Tests that `test --all` runs on JAX arrays.
JAX_TESTS_OF_ALL = [
    *JAX_TESTS,
    *list_test_files(
        "attention", "collectives", "exchange_rules", "lowering", "modes", "rank_mean", "timeline", "updates"
    ),
]
#: Tests of `test --quick`, with PyTensor alone: a minute of those that most changes break.
QUICK_TESTS = list_test_files(
    *("layers", "rows", "reduce", "graphs", "data", "collectives", "rank_programs", "threads", "update_rule"),
    *("user_code", "seed_example"),
)
#: Tests that `test --all` runs with a newer Python, in a minute: processes, signals, threads, pickles, data, training.
NEWER = list_test_files(
    *("commands", "processes", "signals", "threads", "unpicklable", "replacement", "inherited_settings"),
    *("data", "copies", "graphs", "rank_programs", "seed_example", "checkpoint_folder", "trainer_resume"),
)
#: Tests that `test --all` runs on JAX arrays with a newer Python, for which pip takes a newer PyTensor and JAX:
#: conversion of graphs, and uses of parts of JAX that are not public.
NEWER_ON_JAX = [
    *list_test_files("lowering", "vector_parts"),
    "tests/engines/test_fused_launch.py::test_fuse_runs_function_all_reduce_function_in_one_launch",
    "tests/engines/test_fused_launch.py::test_sharded_step_is_one_launch",
    "tests/engines/test_fused_launch.py::test_chunk_all_reduce_starts_during_the_backward_pass",
    "tests/engines/test_spmd_program.py::test_spmd_program_all_reduces_in_a_loop[2]",
    "tests/engines/test_spmd_program.py::test_spmd_program_takes_jax_settings_of_the_master",
    "tests/engines/test_spmd_program.py::test_rank_program_compiles_without_autotuning",
]
#: Tests that start programs of their own and wait for them; a job of their own.
PROGRAM_TESTS = list_test_files("demos", "docs")
#: Tests that import `synkhronos.compat`, in processes of their own: ``import theano`` finds another module there, which
#: other tests must not see.
COMPAT_TESTS = "tests/compat"
LASAGNE_TESTS = "tests/lasagne_demos"
#: Tests of these folders that compile for minutes, by the name of their job: only `test --all` runs them.
COMPILING_TESTS = {
    "zoo": f"{LASAGNE_TESTS}/test_zoo.py",
    "lasagne": f"{COMPAT_TESTS}/test_lasagne.py",
    "old programs": f"{COMPAT_TESTS}/test_programs.py",
}
#: Tests of what depends on the graph library, which run with Theano beside PyTensor; with Theano alone, all tests run.
SECOND_LIBRARY_TESTS = [
    *(f"tests/{name}" for name in ("collectives", "functions", "graph_libraries", "replication")),
    *list_test_files("inherited_settings", "modes", "rank_mean", "release", "replacement", "unpicklable"),
    *list_test_files("master_weights", "shard_optimizer", "train", "train_means", "train_options", "trainer"),
    *list_test_files("transformations", "update_rule", "updates", "launch_theano_mpi"),
]
SECOND_LIBRARY_LASAGNE_TESTS = [f"{LASAGNE_TESTS}/test_{name}.py" for name in ("batch_norm", "training")]
SECOND_LIBRARY_PROGRAMS = [
    "tests/project/test_demos.py::test_mnist_trains_a_little",
    "tests/project/test_docs.py::test_page_examples_print_their_output",
    "tests/project/test_docs.py::test_code_block_runs",
    "tests/ranks/test_faults.py::test_exception_in_a_worker_leaves_ranks_usable",
    "tests/ranks/test_interrupts.py::test_interrupt_is_raised_and_the_next_call_works",
    "tests/hosts/test_hosts.py::test_hosts_compute_the_same_bits_as_one_host[train_network]",
    "tests/hosts/test_hosts_gpus.py::test_all_reduce_accepts_theano_gpu_arrays_on_hosts",
]
#: Number of failures of a job up to which these tests are run a second time: more are not an accident.
MAX_RETRIED_FAILURES = 5
#: The longest jobs, by name, the longest first, so that no core is idle for long while the last ones run.  The third
#: ends when PyMC's environment is installed.
LONGEST_JOBS = [
    "pytensor, faults",
    "pytensor, zoo",
    "pytensor, lasagne",
    "pytensor, training",
    "pymc",
    "pytensor, hosts",
    "pytensor, launch",
    "theano",
    "pytensor, jax",
    "pytensor, compat",
    "pytensor, engines",
    "pytensor",
    "pytensor, old programs",
    "pytensor, ranks",
    "theano, programs",
    "pytensor, programs",
    "theano, lasagne demos",
]
#: Tests that compare update rules with optax's, in a process of their own, since XLA starts in it.
OPTAX_TESTS = "tests/update_rules_optax"
#: Tests of the environment `pymc`.
WITH_PYMC = [
    *list_test_files(
        "posterior",
        "pymc",
        "pymc_chains",
        "pymc_demos",
        "pymc_fuzz",
        "row_slices",
        "rowwise",
        "rowwise_scan",
        "rows_sum",
        "xla_samplers",
    ),
    "tests/project/test_docs.py::test_page_examples_print_their_output[pymc]",
    *(
        f"tests/project/test_docs.py::test_docstring_example_prints_its_output[synkhronos.extensions.pymc.{name}]"
        for name in ("data_parallel", "posterior.compute_log_likelihood", "posterior.sample_posterior_predictive")
    ),
]

#: Tests of the environment `bambi`.
WITH_BAMBI = [
    *list_test_files("bambi"),
    "tests/extensions/test_pymc.py::test_nutpie_sampler_equals_one_process",
    "tests/extensions/test_pymc.py::test_nutpie_called_by_pymc_equals_one_process",
]


def mnist(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Train on MNIST; options go to demos/mnist/train_mnist.py."""
    environment = prepare_environment(ENVIRONMENTS_BY_NAME[options.env], "demos")
    if {"-h", "--help"} & set(extra_arguments):
        print("run.py's own option: --env {pytensor,theano}, the graph library (default: pytensor)\n", flush=True)
    return run_command([environment.python, "demos/mnist/train_mnist.py", *extra_arguments])


def test(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Run the tests in each environment; further arguments go to pytest. Without any, a few run on JAX arrays too."""
    if options.quick:
        extra_arguments = [*QUICK_TESTS, *extra_arguments]
        if not options.here and options.env is None:
            options.env = PYTENSOR.name
    if options.device != "host" and not options.here:
        if options.env in (PYMC.name, BAMBI.name):
            raise make_exit(f"--device {options.device} tests the environment pytensor.")
        if options.env == THEANO.name:
            if options.device == "gpu":
                raise make_exit(
                    "pip can't install pygpu: run --device gpu --here with a Python that has it and Theano."
                )
            raise make_exit(f"--device {options.device} needs PyTensor.")
        options.env = PYTENSOR.name
    if options.all and (extra_arguments or options.here or options.device != "host"):
        raise make_exit("--all takes no further arguments but --env.")
    if options.here:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return run_command(
            [sys.executable, "-m", "pytest", *extra_arguments], SYNKHRONOS_TEST_DEVICE=options.device, PYTHONPATH=path
        )
    require_compiler("the tests use Theano 1.0.5 and PyTensor's C mode")
    extras = {
        PYTENSOR: ["jax", "demos", "hosts", "lasagne", "training", "tensorboard", "test"],
        THEANO: ["demos", "hosts", "lasagne", "training", "test"],
        PYMC: ["pymc-jax", "pymc-zarr", "test"],
        BAMBI: ["test"],
    }
    environments = (
        [ENVIRONMENTS_BY_NAME[options.env]] if options.env else [PYTENSOR, THEANO, *([PYMC] if options.all else [])]
    )
    left_out = []
    if options.env is None and sys.version_info[:2] > NEWEST_PYTHON_FOR_THEANO:
        environments.remove(THEANO)
        left_out.append(f"theano: left out, Theano 1.0.5 needs Python 3.11 and this is {get_python_name()}")
    if options.env is None and options.all:
        if newer := find_newer_environment():
            extras[newer] = ["jax", "training", "test"]
            environments.append(newer)
        else:
            left_out.append(f"newer Python: left out, there is none of 3.{NEWER_PYTHONS[-1]} to 3.{NEWER_PYTHONS[0]}")
    for line in left_out:
        print_message(line)
    if options.device == "gpu":
        extras[PYTENSOR].append("gpu")
    jobs = list_jobs(environments, options, extra_arguments)
    reports = [job.environment.directory / f"tests-{i}.xml" for i, job in enumerate(jobs)]
    for report in reports:
        report.unlink(missing_ok=True)
        shutil.rmtree(report.with_suffix(".cache"), ignore_errors=True)
    # The main thread waits for Ctrl-C, and the others for the jobs: one more at once than there are cores, since jobs
    # wait for processes and time limits, and two more with --all, whose longest job, of faults, waits most of its time.
    # Tests run in the first environment while the others are installed.
    installer = ThreadPoolExecutor(1)
    installs = {name: installer.submit(prepare_environment, name, *extras[name]) for name in environments}
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)) + (2 if options.all else 1))

    def run(job: Job, report: Path) -> int:
        installs[job.environment].result()
        return job.run(report, alone=len(jobs) == 1)

    try:
        installs[environments[0]].result()
        statuses = list(pool.map(run, jobs, reports))
    except (KeyboardInterrupt, SystemExit) as error:
        for executor in (installer, pool):
            executor.shutdown(cancel_futures=True)
        raise (SystemExit(130) if isinstance(error, KeyboardInterrupt) else error) from None
    ended = zip(jobs, reports, statuses, strict=True)
    summaries = [f"{job.name}: {describe_counts(report, status)}" for job, report, status in ended]
    if len(jobs) > 1:
        for i, (job, report) in enumerate(zip(jobs, reports, strict=True)):
            # A test that measures time may fail beside another job on a busy machine; a fault fails alone, too.
            if 0 < count_failures(report) <= MAX_RETRIED_FAILURES:
                statuses[i] = job.retry(report)
                outcome = "passed" if statuses[i] == 0 else f"failed again, exit status {statuses[i]}"
                summaries.append(f"{job.name}, what failed was run once more, alone: {outcome}")
        # The lines of jobs that ran side by side are mixed: what failed stands here once more, by itself.
        summaries = [
            f"{job.name}: {text}" for job, report in zip(jobs, reports, strict=True) for text in list_failures(report)
        ] + summaries
    print("\n".join(summaries + left_out), flush=True)
    return max(statuses)


def list_jobs(
    environments: Sequence[Environment], options: argparse.Namespace, extra_arguments: list[str]
) -> list[Job]:
    """Return the jobs in the order in which they are started."""
    if extra_arguments or options.device != "host":
        label = "--quick" if options.quick else shlex.join(extra_arguments)
        part = ", ".join(filter(None, ["" if options.device == "host" else options.device, label]))
        return [Job(environment, part, extra_arguments, options.device) for environment in environments]
    jobs = []
    for environment in environments:
        if environment not in (PYTENSOR, THEANO):
            jobs.append(Job(environment, "", {PYMC: WITH_PYMC, BAMBI: WITH_BAMBI}.get(environment, NEWER)))
            if environment is PYMC:  # BlackJAX has installed optax
                jobs.append(Job(environment, "optax", [OPTAX_TESTS]))
            elif environment is not BAMBI:
                jobs.append(Job(environment, "jax", NEWER_ON_JAX, "jax"))
            continue
        is_second = environment is THEANO and PYTENSOR in environments
        jobs += (list_second_library_jobs if is_second else list_library_jobs)(environment, options.all)
    if PYTENSOR in environments:
        jobs.append(Job(PYTENSOR, "jax", JAX_TESTS_OF_ALL if options.all else JAX_TESTS, "jax"))
    positions = {name: i for i, name in enumerate(LONGEST_JOBS)}
    # The newer Python's job takes a minute, longer than the others without a position.
    return sorted(jobs, key=lambda job: (positions.get(job.name, len(positions)), job.arguments is not NEWER))


def list_library_jobs(environment: Environment, with_all: bool) -> list[Job]:
    """Return the jobs with all tests of a graph library; those of docs, demos and faults only with ``--all``."""
    options = ["-m", "not hosts and not faults" + ("" if with_all else " and not slow")]
    folders = {part: [f"tests/{name}" for name in names] for part, names in FOLDERS_OF_PARTS.items()}
    jobs = [Job(environment, part, [*options, *paths]) for part, paths in folders.items()]
    others = [*PROGRAM_TESTS, *(path for paths in folders.values() for path in paths)]
    jobs.append(Job(environment, "", [*options, *(f"--ignore={path}" for path in others)]))
    check_options = [*options, "--timeout=1200", *(f"--ignore={path}" for path in COMPILING_TESTS.values())]
    jobs.append(Job(environment, "compat", [*check_options, COMPAT_TESTS]))
    jobs.append(Job(environment, "lasagne demos", [*check_options, LASAGNE_TESTS]))
    jobs.append(Job(environment, "programs", [*options, *PROGRAM_TESTS]))
    if with_all:
        jobs += [Job(environment, part, ["--timeout=1200", path]) for part, path in COMPILING_TESTS.items()]
        jobs.append(Job(environment, "faults", ["-m", "faults", *list_marked_files("faults")]))
        jobs.append(Job(environment, "hosts", ["-m", "hosts and not faults", *list_marked_files("hosts")]))
    return jobs


def list_second_library_jobs(environment: Environment, with_all: bool) -> list[Job]:
    """Return the jobs with the tests of what depends on the graph library, for Theano beside PyTensor."""
    options = ["-m", "not hosts and not faults" + ("" if with_all else " and not slow")]
    jobs = [Job(environment, "", [*options, *SECOND_LIBRARY_TESTS])]
    jobs.append(Job(environment, "compat", ["--timeout=1200", f"{COMPAT_TESTS}/test_real_theano.py"]))
    if with_all:
        jobs.append(Job(environment, "lasagne demos", ["--timeout=1200", *SECOND_LIBRARY_LASAGNE_TESTS]))
        jobs.append(Job(environment, "programs", ["-m", "", *SECOND_LIBRARY_PROGRAMS]))
    return jobs


def read_suites(report: Path) -> list[xml.etree.ElementTree.Element]:
    """Return the test suites of pytest's report; an empty list if pytest ended before it wrote one."""
    try:
        return xml.etree.ElementTree.parse(report).getroot().findall("testsuite")
    except (FileNotFoundError, xml.etree.ElementTree.ParseError):
        return []


def list_failures(report: Path) -> list[str]:
    """Return the name of each failed test, with the last 40 lines of its report."""
    failures = []
    for case in (case for suite in read_suites(report) for case in suite.findall("testcase")):
        for problem in (*case.findall("failure"), *case.findall("error")):
            lines = (problem.text or "").splitlines()[-40:]
            failures.append("\n    ".join([f"FAILED {case.get('classname')}::{case.get('name')}", *lines]))
    return failures


def count_failures(report: Path) -> int:
    """Return the number of tests that failed, or 0 where pytest ended before it wrote its report."""
    return sum(int(suite.get(key, 0)) for suite in read_suites(report) for key in ("failures", "errors"))


def describe_counts(report: Path, status: int) -> str:
    """Return the numbers of passed, failed and skipped tests in pytest's report, as text."""
    suites = read_suites(report)
    if not suites:
        return f"no result, pytest ended with exit status {status}"
    total, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    text = f"{total - failed - skipped} passed, {failed} failed"
    return f"{text}, {skipped} skipped" if skipped else text


def messages(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Write tests/messages.txt anew: the errors of all tests that compare theirs with it, or of the named files."""
    golden = ROOT / "tests" / "messages.txt"
    users = [path for path in (ROOT / "tests").glob("*/test_*.py") if "from messages import" in path.read_text()]
    files = extra_arguments or sorted(str(path.relative_to(ROOT)) for path in users)
    # A test file's name stands at the margin, and its messages below.
    parts = re.split(r"(?m)^(?=\S)", golden.read_text())
    golden.write_text("".join(part for part in parts if part.split("\n")[0] not in files))
    with_pymc = [name for name in WITH_PYMC if name in files]
    jobs = [(PYTENSOR, files), (THEANO, files), *([(PYMC, with_pymc)] if with_pymc else [])]
    return max(
        run_command(
            [prepare_environment(environment, "test").python, "-m", "pytest", "-q", "-m", "", *names],
            SYNKHRONOS_MESSAGES="write",
        )
        for environment, names in jobs
    )


def lint(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Check style, format, types and names: ruff, mypy and tests/support/lint_names.py."""
    python = prepare_environment(PYTENSOR, "dev").python
    tools = ("-m ruff check", "-m ruff format --check", "-m mypy", "tests/support/lint_names.py")
    return run_commands([[python, *tool.split()] for tool in tools])


def docs(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Build the documentation into docs/_build/html; a warning is an error, as is damaged markup (docs/damage.py)."""
    python = prepare_environment(PYTENSOR, "docs").python
    return run_command([python, "-m", "sphinx", "-W", "--keep-going", "-E", "-b", "html", "docs", "docs/_build/html"])


def bench(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Run one benchmark, or all of them; further arguments go to it (``bench NAME -- --help`` lists them)."""
    known = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if not p.stem.startswith("_"))
    if options.name and options.name not in known:
        raise make_exit(f"there is no benchmark {options.name!r}; there are: {', '.join(known) or 'none'}")
    names = [options.name] if options.name else known
    python = prepare_environment(ENVIRONMENTS_BY_NAME[options.env], "bench").python
    return run_commands([[python, "-m", f"benchmarks.{name}", *extra_arguments] for name in names])


def demo(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Run one of the scripts in demos/; further arguments go to it (``--ranks 4``, or ``-- --help``)."""
    numbered = {p.stem.split("_")[1]: p for p in sorted((ROOT / "demos").glob("demo_*.py"))}
    lasagne = {p.stem: p for p in sorted((ROOT / "demos").glob("*/train_*.py")) if p.parent.name != "mnist"}
    with_pymc = {p.stem: p for p in sorted((ROOT / "demos" / "pymc").glob("*.py"))}
    known = {**numbered, **lasagne, **with_pymc}
    if options.script not in known:
        raise make_exit(f"there is no demo {options.script!r}; there are: {', '.join(known) or 'none'}")
    extras = ["lasagne"] if options.script in lasagne else []
    environment = prepare_environment(
        PYMC if options.script in with_pymc else ENVIRONMENTS_BY_NAME[options.env], *extras
    )
    return run_command([environment.python, known[options.script], *(word for word in extra_arguments if word != "--")])


def env(options: argparse.Namespace, extra_arguments: list[str]) -> int:
    """Print the path of an environment's Python, and make the environment if need be."""
    print(prepare_environment(ENVIRONMENTS_BY_NAME[options.name], *options.extras).python)
    return 0


class Parser(argparse.ArgumentParser):
    """A parser that ends with one line where arguments are wrong."""

    def error(self, message: str) -> NoReturn:
        """End with the message."""
        self.exit(2, f"run.py: {message}; see python3 {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of run.py's arguments."""
    result = Parser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = result.add_subparsers(metavar="COMMAND", dest="command")

    def add_command(
        function: Callable[[argparse.Namespace, list[str]], int],
        passes_on: bool = False,
        add_help: bool = True,
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            function.__name__,
            help=function.__doc__,
            description=function.__doc__,
            add_help=add_help,
            # Otherwise --e of a script's options would be taken for --env.
            allow_abbrev=False,
        )
        sub.set_defaults(function=function, passes_on=passes_on)
        return sub

    def add_env_option(sub: argparse.ArgumentParser, default: str | None, text: str) -> None:
        sub.add_argument("--env", choices=list(ENVIRONMENTS_BY_NAME), default=default, help=text)

    help_text = "the graph library to use (default: %(default)s)"
    # --help goes to the script too, which lists its options.
    add_env_option(add_command(mnist, passes_on=True, add_help=False), PYTENSOR.name, help_text)
    test_parser = add_command(test, passes_on=True)
    add_env_option(test_parser, None, "test in this environment only (default: in all)")
    test_parser.add_argument(
        "--device",
        choices=["host", "jax", "gpu"],
        default="host",
        help="what functions compute with: NumPy arrays, JAX arrays on the CPU, or on GPUs (default: %(default)s)",
    )
    test_parser.add_argument(
        "--here", action="store_true", help="test with this Python and the packages that it has: nothing is installed"
    )
    test_parser.add_argument(
        "--all",
        action="store_true",
        help="run all tests: also PyMC's, slow ones, and those that need several hosts, kill processes or compile for "
        "minutes",
    )
    test_parser.add_argument(
        "--quick", action="store_true", help="run tests that take a minute, with PyTensor unless --env names another"
    )
    add_command(messages, passes_on=True)
    add_command(lint)
    add_command(docs)
    bench_parser = add_command(bench, passes_on=True)
    bench_parser.add_argument("name", nargs="?", help="a module in benchmarks/ (default: all of them)")
    add_env_option(bench_parser, PYTENSOR.name, help_text)
    demo_parser = add_command(demo, passes_on=True)
    demo_parser.add_argument("script", help="which one: 1 to 5, or train_resnet for example")
    add_env_option(demo_parser, PYTENSOR.name, help_text)
    env_parser = add_command(env)
    env_parser.add_argument("name", choices=list(ENVIRONMENTS_BY_NAME), help="the environment")
    env_parser.add_argument("extras", nargs="*", metavar="EXTRA", help="of pyproject.toml, to install as well")
    return result


def main() -> int:
    """Run the command that the user named."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise make_exit(f"Synkhronos needs Python 3.11 or newer; this is {get_python_name()}.")
    parser = make_parser()
    options, extra_arguments = parser.parse_known_args()
    if options.command is None:
        parser.error("expected a command, such as mnist, demo or test")
    if extra_arguments and not options.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(extra_arguments)}")
    try:
        return options.function(options, extra_arguments)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise make_exit(NO_ROOM) from None
        raise make_exit(str(error)) from None
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
