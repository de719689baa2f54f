"""The C++ handlers by which XLA calls NCCL, on the CPU, with fakes of CUDA and NCCL."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from library import NAME
from system import LIMIT_SECONDS, run_code

from synkhronos.devices import choose_device
from synkhronos.devices.cuda import launch_state, nccl
from synkhronos.devices.jax import ffi_collectives
from synkhronos.devices.jax.nccl_handlers import FINISH_TARGET, START_TARGET

pytestmark = [
    pytest.mark.skipif(NAME != "pytensor", reason="Theano's environment has no JAX"),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def run_program(program):
    """Run a program of handler_programs.py in a new process; return the lines that it prints."""
    code = f"""
        import handler_programs
        handler_programs.{program}
    """
    return run_code(code, timeout=LIMIT_SECONDS + 120, JAX_PLATFORMS="cpu").splitlines()


def all_reduced(n_items, dtype, op="sum", on=None):
    """Return the description that handler_programs.py prints of an all-reduce on a stream; XLA's own stream is None."""
    return f"{n_items} of {nccl.NCCL_DTYPES[dtype]} by {nccl.NCCL_OPS[op]} in 1234 on {on}"


@needs_compiler
def test_nccl_handler_failure_keeps_donated_arrays():
    good, twice, failed, after, aborted, outside = run_program("reduce_once()")
    average = all_reduced(3, "float32", "avg")
    reduced = [average, "flag on None"]
    assert good == after == f"[[1.0, 3.0, 5.0], 1]; {reduced}"
    assert twice == f"[[1.0, 3.0, 5.0], 1]; RuntimeError: the launch made 1 collectives, expected 2; {reduced}"
    before = "[[1.0, 1.0, 1.0], 0]; RuntimeError"
    assert failed == f"{before}: NCCL failed within a launch (ncclResult_t 3); {[average]}"
    assert aborted == f"{before}: the connection between the ranks' GPUs was aborted; []"
    assert outside == "outside: True"


@needs_compiler
def test_chunks_are_reduced_on_the_side_stream_and_waited_for():
    good, failed, other = run_program("reduce_chunks()")
    side, event = 8, 9  # the numbers of handler_programs.py
    start = [f"record {event} on None", f"{side} waits for {event}", all_reduced(3, "float32", on=side)]
    join = [f"record {event} on {side}", f"None waits for {event}"]
    finish_calls = [all_reduced(4, "float32"), all_reduced(1, "bfloat16"), "flag on None"]
    assert good == f"[[2.0, 2.0, 2.0], [[2.0, 2.0], [2.0, 2.0]], 1]; {start + join + finish_calls}"
    # After an error the launch still waits for the side stream.
    assert failed.endswith(f", 0]; RuntimeError: NCCL failed within a launch (ncclResult_t 3); {start + join}")
    assert other == "[]; ValueError: collective: expected 8 items, as before the launch, got 4; []"


@needs_compiler
def test_nccl_handler_is_called_in_each_iteration():
    assert run_program("reduce_in_loop()") == [
        "[[1024.0, 1024.0, 1024.0], 10, 10] 10",
        "[[8.0, 8.0, 8.0], 10, 3]; RuntimeError: NCCL failed within a launch (ncclResult_t 3) 4",
    ]


@needs_compiler
def test_handlers_are_not_recorded_in_cuda_graphs():
    assert run_program("read_traits()") == [f"{START_TARGET} None 0", f"{FINISH_TARGET} None 0"]


def test_dtype_tables_agree_with_the_handlers_and_xla():
    source = Path(ffi_collectives.__file__).with_name("nccl_ffi.cc").read_text()
    in_handlers = re.findall(r"case ffi::DataType::(\w+): return (\d+);", source)
    assert {to_dtype_name(name): int(number) for name, number in in_handlers} == nccl.NCCL_DTYPES

    (jaxlib,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    header = Path(jaxlib, "include/xla/ffi/api/c_api.h").read_text()
    in_xla = {name: int(number) for name, number in re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", header)}
    assert ffi_collectives._DTYPE_BY_XLA_NUMBER == {in_xla[name]: to_dtype_name(name) for name, _ in in_handlers}


def to_dtype_name(xla_name):
    """Return NumPy's name of a dtype, such as "int8", from XLA's, such as "S8"."""
    letters, bits = re.fullmatch(r"([A-Z]+)(\d+)", xla_name).groups()
    return {"S": "int", "U": "uint", "F": "float", "BF": "bfloat"}[letters] + bits


def test_several_processes_compile_once(tmp_path):
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$1" >> {log}\nsleep 0.3\nfor last; do :; done\necho library > "$last"\n')
    compiler.chmod(0o755)
    code = (
        "from synkhronos.devices.jax import nccl_handlers as n; print(n.get_or_compile_handlers().read_text().strip())"
    )
    environment = {"CXX": f"{compiler} -m64", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environment}, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=LIMIT_SECONDS + 60)[0] for process in processes] == 2 * [b"library\n"]
    assert log.read_text() == "-m64\n"
    assert sorted(path.suffix for path in (tmp_path / "cache" / "synkhronos").iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize(("compiler", "words"), [("no-such-compiler", "not installed"), ("false", "can't be used")])
def test_without_a_compiler_xla_calls_through_python(tmp_path, compiler, words):
    code = """
        import logging, os
        logging.basicConfig(format="%(message)s", stream=__import__("sys").stdout)
        from synkhronos.devices import JAX
        print([JAX.nccl_call_mode, JAX.nccl_call_mode])
    """
    environment = {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    message, calls = run_code(
        code, timeout=LIMIT_SECONDS + 60, SYNKHRONOS_NCCL_CALLS="native", **environment
    ).splitlines()
    assert message.startswith("XLA calls NCCL through Python") and words in message
    assert calls == "['python', 'python']"
    assert not list(tmp_path.glob("*/*.so"))
    assert run_code(code, timeout=LIMIT_SECONDS + 60, SYNKHRONOS_NCCL_CALLS="", **environment).strip() == calls


def test_choose_device_refuses_unknown_nccl_calls(monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_NCCL_CALLS", "quickly")
    with pytest.raises(ValueError, match="SYNKHRONOS_NCCL_CALLS: expected python or native, got 'quickly'"):
        choose_device(use_gpu=False, n_parallel=1)


def test_launch_state_is_equal_in_python_and_in_cpp():
    source = Path(launch_state.__file__).parents[1].joinpath("jax", "nccl_ffi.cc").read_text()
    (struct,) = re.findall(r"^struct LaunchState \{$(.*?)^\};$", source, re.DOTALL | re.MULTILINE)
    fields = [(name, ctypes.c_int64) for name in re.findall(r"^  int64_t (\w+);", struct, re.MULTILINE)]
    assert fields == launch_state.LaunchState._fields_
    assert f"kAborted = {launch_state._ABORTED}, kNccl = {launch_state._NCCL}," in source
