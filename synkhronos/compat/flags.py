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

#: Flags of both libraries that PyTensor refuses to set once it is imported.
_IMPORT_FLAGS = ("optimizer", "scan__allow_output_prealloc")
#: Present values of these flags, and of Theano's flags that have no meaning in PyTensor: scripts may set them, without
#: an effect.
_emulated_flags: dict[str, Any] = {
    **dict.fromkeys(
        """
        cache_optimizations conv.assert_shape experimental.unpickle_gpu_on_cpu force_device gpuarray.sync
        lib.amdlibm magma.enabled nvcc.fastmath print_test_value reoptimize_unpickled_function scan.allow_gc
        scan.debug warn.argmax_pushdown_bug warn.gpu_set_subtensor1 warn.gpusum_01_011_0111_bug
        warn.identify_1pexp_bug warn.inc_set_subtensor1 warn.reduce_join warn.round warn.signal_conv2d_interface
        warn.subtensor_merge_bug warn.sum_div_dimshuffle_bug warn.sum_sum_bug warn.vm_gc_bug
        """.split(),
        False,
    ),
    **dict.fromkeys(
        """
        contexts ctc.root dnn.base_path dnn.bin_path dnn.include_path dnn.library_path gpuarray.cache_path
        init_gpu_device magma.include_path magma.library_path metaopt.optimizer_excluding
        metaopt.optimizer_including
        """.split(),
        "",
    ),
    **dict.fromkeys(
        """
        dnn.conv.algo_bwd dnn.conv.workmem dnn.conv.workmem_bwd experimental.local_alloc_elemwise
        experimental.local_alloc_elemwise_assert gpu.local_elemwise_fusion gpuarray.single_stream
        gpuelemwise.sync pickle_test_value print_active_device tensor.local_elemwise_fusion unpickle_function
        warn.inc_subtensor1_opt
        """.split(),
        True,
    ),
    **dict.fromkeys([f"numpy.seterr_{kind}" for kind in ("divide", "invalid", "over", "under")], None),
    "assert_no_cpu_op": "ignore",
    "numpy.seterr_all": "ignore",
    "compute_test_value": "off",
    "compute_test_value_opt": "off",
    "cuda.include_path": "/usr/local/include",
    "cuda.root": "/usr/local",
    "deterministic": "default",
    "gpuarray.sched": "default",
    "device": "cpu",
    "dnn.conv.algo_bwd_data": "none",
    "dnn.conv.algo_bwd_filter": "none",
    "dnn.conv.algo_fwd": "small",
    "dnn.conv.precision": "as_input_f32",
    "dnn.enabled": "False",
    "gpuarray.preallocate": -1.0,
    "int_division": "int",
    "lib.cnmem": 0.0,
    "metaopt.verbose": 0,
    "optimizer": "fast_run",
    "scan.allow_output_prealloc": True,
    "unittests.rseed": "666",
    "warn.ignore_bug_before": "0.9",
}


def format_unsupported_message(name: str) -> str:
    """Return the message of errors for a module or name of Theano that `synkhronos.compat` does not provide."""
    return (
        f"{name} is not provided by synkhronos.compat on PyTensor; the page docs/from_theano.rst, "
        '"From Theano", lists the names that are'
    )


def to_pytensor_flags(theano_flags: str, pytensor_flags: str = "") -> str:
    """Translate flags for Theano to flags for PyTensor, whose present flags take precedence.

    A GPU in ``device=`` asks for JAX mode, which computes on GPUs.
    """
    flags = dict(flag.strip().split("=", 1) for flag in theano_flags.split(",") if "=" in flag)
    translated = [f"{_to_pytensor_name(name)}={value}" for name, value in flags.items() if name in _COMMON_FLAGS]
    if flags.get("device", "cpu").startswith(("cuda", "gpu", "opencl")) and "mode" not in flags:
        translated.insert(0, "mode=JAX")
    ignored = [name for name in flags if name not in _COMMON_FLAGS and name != "device"]
    if ignored:
        _log.info("flags without a meaning in PyTensor are ignored: %s", ", ".join(ignored))
    return ",".join(translated + ([pytensor_flags] if pytensor_flags else []))


def _to_pytensor_name(name: str) -> str:
    """Convert Theano's name of a flag to PyTensor's."""
    return name.replace(".", "__")


class Config:
    """The object ``theano.config``, which reads and sets PyTensor's configuration.

    PyTensor writes a section as a prefix of the flag's name: ``theano.config.blas.ldflags`` is ``blas__ldflags``.
    """

    def __init__(self, config: Any, prefix: str = ""):
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_prefix", prefix)

    def __getattr__(self, name: str) -> Any:
        full_name = self._prefix + name
        if name.startswith("__"):
            raise AttributeError(name)
        if self._is_pytensors(full_name):
            return getattr(self._config, full_name)
        theano_name = full_name.replace("__", ".")
        if theano_name in _emulated_flags:
            return _emulated_flags[theano_name]
        if any(
            flag.startswith(f"{full_name}__") for flag in (*map(_to_pytensor_name, _emulated_flags), *dir(self._config))
        ):
            return Config(self._config, f"{full_name}__")
        raise AttributeError(format_unsupported_message(f"theano.config.{theano_name}"))

    def __setattr__(self, name: str, value: Any) -> None:
        full_name = self._prefix + name
        theano_name = full_name.replace("__", ".")
        if self._is_pytensors(full_name):
            setattr(self._config, full_name, value)
        elif theano_name == "compute_test_value" and value != "off":
            reason = format_unsupported_message(f"theano.config.{theano_name}")
            raise AttributeError(f"PyTensor computes no test values: {reason}")
        elif theano_name in _emulated_flags:
            _emulated_flags[theano_name] = value
        else:
            raise AttributeError(format_unsupported_message(f"theano.config.{theano_name}"))

    def change_flags(self, **flags: Any) -> Any:
        """Return a context manager and decorator that changes PyTensor's flags.

        Flags without an effect in PyTensor are ignored.  Flags that Theano lacks are ignored too, although assigning
        one raises AttributeError.
        """
        pytensor_flags = {_to_pytensor_name(name): value for name, value in flags.items()}
        return self._config.change_flags(**{n: v for n, v in pytensor_flags.items() if self._is_pytensors(n)})

    def _is_pytensors(self, full_name: str) -> bool:
        """Whether PyTensor has a flag and can set it."""
        return hasattr(self._config, full_name) and full_name not in _IMPORT_FLAGS
