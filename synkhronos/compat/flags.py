"""THEANO_FLAGS and ``theano.config`` on PyTensor."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("synkhronos")

#: Flags with the same meaning in both libraries; Theano writes a dot for PyTensor's two underscores.
_COMMON_FLAGS = (
    "allow_gc",
    "blas.ldflags",
    "cast_policy",
    "compiledir",
    "base_compiledir",
    "cxx",
    "exception_verbosity",
    "floatX",
    "gcc.cxxflags",
    "mode",
    "on_opt_error",
    "on_unused_input",
    "openmp",
    "profile",
    "warn_float64",
)

#: Theano's flags without a meaning in PyTensor, with their present values: programs may set them, without an effect.
_emulated_flags: dict[str, Any] = {
    "assert_no_cpu_op": "ignore",
    "cache_optimizations": False,
    "compute_test_value": "off",
    "compute_test_value_opt": "off",
    "contexts": "",
    "conv.assert_shape": False,
    "ctc.root": "",
    "cuda.include_path": "/usr/local/include",
    "cuda.root": "/usr/local",
    "deterministic": "default",
    "device": "cpu",
    "dnn.base_path": "",
    "dnn.bin_path": "",
    "dnn.conv.algo_bwd": True,
    "dnn.conv.algo_bwd_data": "none",
    "dnn.conv.algo_bwd_filter": "none",
    "dnn.conv.algo_fwd": "small",
    "dnn.conv.precision": "as_input_f32",
    "dnn.conv.workmem": True,
    "dnn.conv.workmem_bwd": True,
    "dnn.enabled": "False",
    "dnn.include_path": "",
    "dnn.library_path": "",
    "experimental.local_alloc_elemwise": True,
    "experimental.local_alloc_elemwise_assert": True,
    "experimental.unpickle_gpu_on_cpu": False,
    "force_device": False,
    "gpu.local_elemwise_fusion": True,
    "gpuarray.cache_path": "",
    "gpuarray.preallocate": -1.0,
    "gpuarray.sched": "default",
    "gpuarray.single_stream": True,
    "gpuarray.sync": False,
    "gpuelemwise.sync": True,
    "init_gpu_device": "",
    "int_division": "int",
    "lib.amdlibm": False,
    "lib.cnmem": 0.0,
    "magma.enabled": False,
    "magma.include_path": "",
    "magma.library_path": "",
    "metaopt.optimizer_excluding": "",
    "metaopt.optimizer_including": "",
    "metaopt.verbose": 0,
    "numpy.seterr_all": "ignore",
    "numpy.seterr_divide": None,
    "numpy.seterr_invalid": None,
    "numpy.seterr_over": None,
    "numpy.seterr_under": None,
    "nvcc.fastmath": False,
    "pickle_test_value": True,
    "print_active_device": True,
    "print_test_value": False,
    "reoptimize_unpickled_function": False,
    "scan.allow_gc": False,
    "scan.debug": False,
    "tensor.local_elemwise_fusion": True,
    "unittests.rseed": "666",
    "unpickle_function": True,
    "warn.argmax_pushdown_bug": False,
    "warn.gpu_set_subtensor1": False,
    "warn.gpusum_01_011_0111_bug": False,
    "warn.identify_1pexp_bug": False,
    "warn.ignore_bug_before": "0.9",
    "warn.inc_set_subtensor1": False,
    "warn.inc_subtensor1_opt": True,
    "warn.reduce_join": False,
    "warn.round": False,
    "warn.signal_conv2d_interface": False,
    "warn.subtensor_merge_bug": False,
    "warn.sum_div_dimshuffle_bug": False,
    "warn.sum_sum_bug": False,
    "warn.vm_gc_bug": False,
}


def explain_unsupported(name: str) -> str:
    """Return the message for a module or name of Theano that `synkhronos.compat` does not provide.

    Examples
    --------
    >>> explain_unsupported("theano.gpuarray").split(";")[0]
    'theano.gpuarray is not provided by synkhronos.compat on PyTensor'
    """
    return (
        f"{name} is not provided by synkhronos.compat on PyTensor; the page docs/from_theano.rst, "
        '"From Theano", lists the names that are'
    )


def to_pytensor_flags(theano_flags: str, pytensor_flags: str = "") -> str:
    """Translate flags for Theano to flags for PyTensor.

    Parameters
    ----------
    theano_flags : str
        As in THEANO_FLAGS.  A GPU in ``device=`` asks for JAX mode, which computes on GPUs.
    pytensor_flags : str
        Present flags of PyTensor, which take precedence.

    Returns
    -------
    str
        As in PYTENSOR_FLAGS.

    Examples
    --------
    >>> to_pytensor_flags("floatX=float32,device=cuda,dnn.enabled=False")
    'mode=JAX,floatX=float32'
    >>> to_pytensor_flags("floatX=float32", "floatX=float64")
    'floatX=float32,floatX=float64'
    """
    flags = dict(flag.strip().split("=", 1) for flag in theano_flags.split(",") if "=" in flag)
    passed = [f"{_to_pytensor_name(name)}={value}" for name, value in flags.items() if name in _COMMON_FLAGS]
    if flags.get("device", "cpu").startswith(("cuda", "gpu", "opencl")) and "mode" not in flags:
        passed.insert(0, "mode=JAX")
    dropped = [name for name in flags if name not in _COMMON_FLAGS and name != "device"]
    if dropped:
        _log.info("flags without a meaning in PyTensor are ignored: %s", ", ".join(dropped))
    return ",".join(passed + ([pytensor_flags] if pytensor_flags else []))


def _to_pytensor_name(name: str) -> str:
    """Convert Theano's name of a flag to PyTensor's."""
    return name.replace(".", "__")


class Config:
    """``theano.config``: reads and sets PyTensor's configuration.

    Parameters
    ----------
    config : object
        ``pytensor.config``.
    section : str
        Prefix of the names: ``theano.config.blas`` has the section ``blas__``.

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
        full_name = self._section + name
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(self._config, full_name):
            return getattr(self._config, full_name)
        theano_name = full_name.replace("__", ".")
        if theano_name in _emulated_flags:
            return _emulated_flags[theano_name]
        if any(
            flag.startswith(f"{full_name}__") for flag in (*map(_to_pytensor_name, _emulated_flags), *dir(self._config))
        ):
            return Config(self._config, f"{full_name}__")
        raise AttributeError(explain_unsupported(f"theano.config.{theano_name}"))

    def __setattr__(self, name: str, value: Any) -> None:
        full_name = self._section + name
        theano_name = full_name.replace("__", ".")
        if hasattr(self._config, full_name):
            setattr(self._config, full_name, value)
        elif theano_name == "compute_test_value" and value != "off":
            reason = explain_unsupported(f"theano.config.{theano_name}")
            raise AttributeError(f"PyTensor computes no test values: {reason}")
        elif theano_name in _emulated_flags:
            _emulated_flags[theano_name] = value
        else:
            raise AttributeError(explain_unsupported(f"theano.config.{theano_name}"))

    def change_flags(self, **flags: Any) -> Any:
        """Return a context manager and decorator that changes PyTensor's flags.

        Other flags are ignored, even those that Theano lacks, too, for which an assignment raises AttributeError.
        """
        named = {_to_pytensor_name(name): value for name, value in flags.items()}
        return self._config.change_flags(**{n: v for n, v in named.items() if hasattr(self._config, n)})
