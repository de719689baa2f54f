"""Import of ``theano`` for scripts that use it, in the process that will fork the ranks."""

from __future__ import annotations

import contextlib
import os
import sys


def import_theano_before_fork(use_gpu: bool) -> None:
    """Set the graph libraries' flags and import ``theano`` without mpi4py.

    The process that will fork the ranks calls this, for two reasons:

    - If each rank imported Theano by itself, ranks would wait for the lock of Theano's compiler.
    - Theano imports mpi4py where it is installed, for Ops that send and receive, and so initializes MPI.  Forked ranks
      would be copies of one MPI process, which may not call MPI, and a killed run would leave MPI's shared memory in
      /dev/shm.  For this reason, Theano is imported as if mpi4py were missing.  A script that imports mpi4py itself
      initializes MPI in its own process, after the fork.
    """
    if use_gpu:
        _set_default_flag("PYTENSOR_FLAGS", "mode", "JAX")
    # Seconds between two tries for the compiler's lock; by default 5 to 10.
    _set_default_flag("THEANO_FLAGS", "compile.wait", "1")
    hides_mpi4py = "mpi4py" not in sys.modules
    if hides_mpi4py:
        sys.modules["mpi4py"] = None  # type: ignore[assignment]
    try:
        with contextlib.suppress(ImportError):
            import theano  # noqa: F401
    finally:
        if hides_mpi4py:
            del sys.modules["mpi4py"]


def _set_default_flag(variable: str, name: str, value: str) -> None:
    """Set a flag of a graph library, unless the user has set it."""
    flags = os.environ.get(variable, "")
    if not any(flag.strip().startswith(f"{name}=") for flag in flags.split(",")):
        os.environ[variable] = ",".join(filter(None, [flags, f"{name}={value}"]))
