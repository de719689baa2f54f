"""Handlers in C++ by which XLA calls NCCL.  They are compiled at their first use, and cached on disk.

Without a compiler, XLA calls NCCL through Python (`ffi_collectives`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from synkhronos.devices.cuda.launch_state import LaunchState
from synkhronos.devices.jax.xla_ffi import register_target

_log = logging.getLogger("synkhronos")

_SOURCE = Path(__file__).with_name("nccl_ffi.cc")
_OPTIONS = ("-std=c++17", "-O2", "-DNDEBUG", "-shared", "-fPIC")
#: Names under which the handlers are registered with XLA.
START_TARGET, FINISH_TARGET = "synkhronos_native_start", "synkhronos_native_finish"

#: The way in which XLA calls NCCL within a launch; see `FfiCollectives`.
NcclCallMode = Literal["python", "native"]


def read_nccl_call_mode() -> NcclCallMode:
    """Return the value of ``SYNKHRONOS_NCCL_CALLS``, by default "native".  Raise ValueError for an unknown mode."""
    mode = os.environ.get("SYNKHRONOS_NCCL_CALLS") or "native"
    if mode not in get_args(NcclCallMode):
        raise ValueError(f"SYNKHRONOS_NCCL_CALLS: expected python or native, got {mode!r}")
    return cast(NcclCallMode, mode)


@cache
def register_handlers() -> Any:
    """Register the library of handlers with XLA, and return it.  If it can't be used, log why, and return None."""
    try:
        library = ctypes.CDLL(str(get_or_compile_handlers()))
        for name in (START_TARGET, FINISH_TARGET):
            register_target(name, getattr(library, name))
        library.synkhronos_set_launch_state.argtypes = [ctypes.POINTER(LaunchState)]
        library.synkhronos_set_launch_state.restype = None
    except Exception as error:
        detail = error.stderr.strip()[-500:] if isinstance(error, subprocess.CalledProcessError) else error
        level = logging.WARNING if os.environ.get("SYNKHRONOS_NCCL_CALLS") else logging.INFO  # whether it was asked for
        _log.log(level, "XLA calls NCCL through Python, as its handlers in C++ can't be used: %s", detail)
        return None
    return library


def get_or_compile_handlers() -> Path:
    """Return the path of the compiled handlers.  Compile them if the cache on disk lacks them."""
    import jax
    import jaxlib

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synkhronos"
    key = hashlib.blake2b(_SOURCE.read_bytes(), digest_size=12)
    key.update(f"{jaxlib.__version__} {' '.join(_OPTIONS)} {os.uname().machine}".encode())
    path = folder / f"nccl_ffi_{key.hexdigest()}.so"
    if path.exists():
        return path
    compiler, *arguments = shlex.split(os.environ.get("CXX") or "g++")  # it may be "ccache g++"
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"{compiler} is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{path.stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that only one of several ranks compiles
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                built = Path(temporary, path.name)
                command = [
                    compiler,
                    *arguments,
                    *_OPTIONS,
                    f"-I{jax.ffi.include_dir()}",
                    str(_SOURCE),
                    "-o",
                    str(built),
                ]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                built.rename(path)  # atomic, for processes that test without the lock whether it exists
    return path
