"""The graph library of this environment under common names, and helpers for tests on any device."""

import hashlib
import importlib
import os

import numpy as np
import pytest
from hypothesis import settings

import synkhronos as synk
from synkhronos.devices import JAX, PYGPU
from synkhronos.engines.lazy import Result

try:
    import pytensor as package
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
except ImportError:
    import theano as package
    from theano.gof import Apply, Op

#: "pytensor" or "theano"
NAME = package.__name__
tensor = importlib.import_module(f"{NAME}.tensor")
shared = package.shared
grad = package.grad

#: The library's C++ compiler.  Without it Theano folds constants, and PyTensor computes loops, by Python: g++ would take
#: most of the tests' time.  See `compiler` in conftest.py.
COMPILER = package.config.cxx
#: Environment of new processes without Theano's C++ compiler: each would first scan all modules that it
#: has ever compiled.
ENVIRONMENT_WITHOUT_COMPILER = {
    "THEANO_FLAGS": f"{os.environ.get('THEANO_FLAGS', '')},cxx=".lstrip(","),
    "PYTHONWARNINGS": "ignore::UserWarning:theano.configdefaults",  # the warning "g++ not detected"
}
if os.environ.get("SYNKHRONOS_TEST_DEVICE", "host") == "host":
    package.config.cxx = ""

#: Hosts on which the ranks of tests run; none for this machine alone.  See tests/support/hosts.
HOSTS = [host for host in os.environ.get("SYNKHRONOS_TEST_HOSTS", "").split(",") if host]
DEVICE = os.environ.get("SYNKHRONOS_TEST_DEVICE", "host")
#: Whether XLA compiles: arrays are JAX's, outputs are lazy, and rounding differs.
XLA = DEVICE != "host" and NAME == "pytensor"
#: The device of this library's arrays on GPUs.
GPU_DEVICE = PYGPU if NAME == "theano" else JAX
#: Mode of functions with Ops in Python; Python's linker supports no GPU.
INTERPRETED = None if DEVICE == "gpu" and NAME == "theano" else "FAST_COMPILE"


class PythonOp(Op):
    """Op of one argument whose subclasses `compute` a value of the argument's type in Python."""

    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs, *_):
        outputs[0][0] = self.compute(inputs[0])


def function(*args, **kwargs):
    """Return a serial function as reference; not by XLA, which would compile for every shape."""
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
    """Return Hypothesis settings with at most `most` examples, and at most 4 if each compiles for long."""
    return settings(max_examples=min(most, 4) if DEVICE != "host" else most)


def is_array(value):
    """Return whether a value is an array, or with XLA a result that is read later."""
    return isinstance(value, np.ndarray | Result) or GPU_DEVICE.owns(value)


def read_results(results):
    """Read the outputs of a call; after a lazy call, outputs that cannot be reduced raise an error here."""
    for result in results if isinstance(results, list) else [results]:
        np.asarray(result)
    return results


def compute_digest(*arrays):
    """Return a digest of arrays."""
    return hashlib.blake2b(b"".join(np.asarray(a).tobytes() for a in arrays), digest_size=8).hexdigest()


def assert_same(actual, expected):
    """Compare to the last bit, or with a tolerance if two compilers were used."""
    kind = np.asarray(expected).dtype
    if DEVICE != "host" and kind.kind in "fc":
        tolerance = 16 * float(np.finfo(kind).eps)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(actual, expected)
