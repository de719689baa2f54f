"""The graph library of this environment, under one set of names, and helpers for tests on any device.

`ARRAYS`
    The device of the arrays on GPUs.
`COMPILER`, `UNCOMPILED`
    Theano's C++ compiler, which only tests that ask for the fixture `compiler` have; environment of processes without.
`DEVICE`
    Where functions compute whose tests don't say it themselves: see conftest.py.
`INTERPRETED`
    The mode for functions with Ops written in Python, which XLA doesn't know.
`function`
    The library's own.
`fork_ranks`
    Fork on the device.
`limit_examples`
    Hypothesis' settings, with fewer examples where each new shape is compiled.
`is_array`, `read`, `same`
    Whether a value is an ndarray, an array of a device or a result that is read later; its array; equality of two.
"""

import os

import numpy as np
import pytest
from hypothesis import settings

import synkhronos as synk
from synkhronos.devices import JAX, PYGPU
from synkhronos.engines.lazy import Result

try:
    import pytensor as package
    import pytensor.tensor as tensor
except ImportError:
    import theano as package
    import theano.tensor as tensor

#: "pytensor" or "theano"
NAME = package.__name__
shared = package.shared
grad = package.grad

#: Theano's C++ compiler.  Without it Theano folds constants by Python, in a hundredth of the time; see `compiler` in
#: conftest.py.
COMPILER = package.config.cxx
#: Environment in which new processes have no C++ compiler for Theano either: each would first look at all modules that it
#: has ever compiled.
UNCOMPILED = {
    "THEANO_FLAGS": f"{os.environ.get('THEANO_FLAGS', '')},cxx=".lstrip(","),
    "PYTHONWARNINGS": "ignore::UserWarning:theano.configdefaults",  # "g++ not detected"
}
if NAME == "theano" and os.environ.get("SYNKHRONOS_TEST_DEVICE", "host") == "host":
    package.config.cxx = ""

#: Hosts on which the ranks of tests run; none for this machine alone.  See tests/support/hosts.
HOSTS = [host for host in os.environ.get("SYNKHRONOS_TEST_HOSTS", "").split(",") if host]
DEVICE = os.environ.get("SYNKHRONOS_TEST_DEVICE", "host")
#: Whether XLA compiles: JAX arrays, outputs that are read later, products and sums that are joined.
XLA = DEVICE != "host" and NAME == "pytensor"
#: The arrays of this library on GPUs.
ARRAYS = PYGPU if NAME == "theano" else JAX
#: Python's linker knows no GPU.
INTERPRETED = None if DEVICE == "gpu" and NAME == "theano" else "FAST_COMPILE"


def function(*args, **kwargs):
    """Make a serial function to compare with: not by XLA, which would take its time for every shape."""
    if XLA:
        kwargs.setdefault("mode", INTERPRETED)
    return package.function(*args, **kwargs)


def fork_ranks(n, **kwargs):
    """Fork ranks on the device under test."""
    if DEVICE == "gpu" and n > synk.get_n_gpu() * max(1, len(HOSTS)):
        pytest.skip(f"needs {n} GPUs")
    if HOSTS and n > 1:
        counts = [n // len(HOSTS) + (i < n % len(HOSTS)) for i in range(len(HOSTS))]
        if kwargs.get("master_rank", 0) >= counts[0]:
            pytest.skip("the master has to be on the first host")
        kwargs["hosts"] = [f"{host}:{count}" for host, count in zip(HOSTS, counts, strict=True) if count]
    return synk.fork(n, use_gpu=DEVICE == "gpu", **kwargs)


def limit_examples(most):
    """Return settings with at most `most` examples, and at most 4 where each compiles for long."""
    return settings(max_examples=min(most, 4) if DEVICE != "host" else most)


def is_array(value):
    """Return whether a value is an array, or with XLA a result that is read later."""
    return isinstance(value, np.ndarray | Result) or ARRAYS.owns(value)


def read(results):
    """Read the outputs of a call: after an asynchronous call, outputs that can't be reduced raise here."""
    for result in results if isinstance(results, list) else [results]:
        np.asarray(result)
    return results


def same(actual, expected):
    """Compare to the last bit, or where another compiler has made one of the two, short of it."""
    kind = np.asarray(expected).dtype
    if DEVICE != "host" and kind.kind in "fc":
        few_bits = 16 * float(np.finfo(kind).eps)
        np.testing.assert_allclose(actual, expected, rtol=few_bits, atol=few_bits)
    else:
        np.testing.assert_array_equal(actual, expected)


__all__ = [
    "ARRAYS",
    "COMPILER",
    "DEVICE",
    "INTERPRETED",
    "NAME",
    "UNCOMPILED",
    "XLA",
    "limit_examples",
    "fork_ranks",
    "function",
    "grad",
    "is_array",
    "package",
    "read",
    "same",
    "shared",
    "tensor",
]
