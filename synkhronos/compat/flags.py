"""What becomes of THEANO_FLAGS and of ``theano.config`` on PyTensor?

`pytensor_flags`
    The value for PYTENSOR_FLAGS.
`Config`
    ``theano.config``: PyTensor's configuration by Theano's names.
"""

from __future__ import annotations

import logging
from typing import Any

from synkhronos.compat.hook import missing

_LOG = logging.getLogger("synkhronos")

#: The flags that mean the same in both; Theano's sections have a dot where PyTensor has two underscores.  Linkers and
#: rewrites are other ones.
_SHARED = (
    "allow_gc",
    "blas.ldflags",
    "cast_policy",
    "compiledir",
    "base_compiledir",
    "cxx",
    "deterministic",
    "exception_verbosity",
    "floatX",
    "gcc.cxxflags",
    "int_division",
    "mode",
    "on_opt_error",
    "on_unused_input",
    "openmp",
    "profile",
    "warn_float64",
)

#: Theano's flags that PyTensor has no use for, with the values that programs may find, and set again.
_FIXED: dict[str, Any] = {
    "assert_no_cpu_op": "ignore",
    "compute_test_value": "off",
    "contexts": "",
    "device": "cpu",
    "dnn.enabled": "False",
    "experimental.unpickle_gpu_on_cpu": False,
    "force_device": False,
    "gpuarray.preallocate": -1.0,
    "lib.cnmem": 0.0,
    "lib.amblibm": False,
    "nvcc.fastmath": False,
    "print_active_device": True,
    "reoptimize_unpickled_function": False,
    "scan.allow_gc": False,
    "unpickle_function": True,
}


def pytensor_flags(theano_flags: str, given: str = "") -> str:
    """Return flags for PyTensor that mean what flags for Theano do.

    Parameters
    ----------
    theano_flags : str
        As in THEANO_FLAGS.  A GPU in ``device=`` asks for JAX mode, which computes on GPUs.
    given : str
        Flags that are there already; they win.

    Returns
    -------
    str

    Examples
    --------
    >>> pytensor_flags("floatX=float32,device=cuda,dnn.enabled=False")
    'mode=JAX,floatX=float32'
    >>> pytensor_flags("floatX=float32", "floatX=float64")
    'floatX=float32,floatX=float64'
    """
    flags = dict(flag.strip().split("=", 1) for flag in theano_flags.split(",") if "=" in flag)
    passed = [f"{name.replace('.', '__')}={value}" for name, value in flags.items() if name in _SHARED]
    if flags.get("device", "cpu").startswith(("cuda", "gpu", "opencl")) and "mode" not in flags:
        passed.insert(0, "mode=JAX")
    dropped = [name for name in flags if name not in _SHARED and name != "device"]
    if dropped:
        _LOG.info("PyTensor has no use for these of THEANO_FLAGS: %s", ", ".join(dropped))
    return ",".join(passed + ([given] if given else []))


class Config:
    """``theano.config``: reads and sets PyTensor's configuration.

    Parameters
    ----------
    config
        ``pytensor.config``.
    section : str
        The names' first part, with two underscores: ``theano.config.blas`` is the section ``blas__``.

    Examples
    --------
    >>> import pytensor
    >>> Config(pytensor.config).floatX
    'float64'
    >>> Config(pytensor.config).device
    'cpu'
    """

    def __init__(self, config: Any, section: str = ""):
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_section", section)

    def __getattr__(self, name: str) -> Any:
        full = self._section + name
        if name.startswith("__"):
            raise AttributeError(name)
        if full == "change_flags":
            return self._change_flags
        if hasattr(self._config, full):
            return getattr(self._config, full)
        theano_name = full.replace("__", ".")
        if theano_name in _FIXED:
            return _FIXED[theano_name]
        if any(known.startswith(f"{theano_name}.") for known in (*_FIXED, *_SHARED)):
            return Config(self._config, f"{full}__")
        raise AttributeError(missing(f"theano.config.{theano_name}"))

    def __setattr__(self, name: str, value: Any) -> None:
        full = self._section + name
        theano_name = full.replace("__", ".")
        if hasattr(self._config, full):
            setattr(self._config, full, value)
        elif theano_name == "compute_test_value" and value != "off":
            raise AttributeError(f"PyTensor computes no test values: {missing('theano.config.compute_test_value')}")
        elif theano_name in _FIXED:
            _FIXED[theano_name] = value
        else:
            raise AttributeError(missing(f"theano.config.{theano_name}"))

    def _change_flags(self, **flags: Any) -> Any:
        return self._config.change_flags(
            **{name: value for name, value in flags.items() if hasattr(self._config, name)}
        )
