"""The module ``theano.compile``, on PyTensor: functions and shared variables."""

import warnings
from typing import Any

import pytensor
from pytensor.compile import (
    FAST_COMPILE,
    DeepCopyOp,
    FunctionMaker,
    Mode,
    Out,
    ProfileStats,
    SharedVariable,
    UnusedInputError,
    ViewOp,
    as_op,
    deep_copy_op,
    get_default_mode,
    get_mode,
    optdb,
    predefined_linkers,
    predefined_modes,
    predefined_optimizers,
    register_linker,
    register_mode,
    register_optimizer,
    shared_constructor,
    view_op,
)
from pytensor.compile.builders import OpFromGraph

from synkhronos.compat.functions import In, add_theano_semantics, patch_pytensor, with_numpy_output_linker
from synkhronos.lowering import bounded_canonizer

patch_pytensor()

from theano.compile import io, ops, sharedvalue
from theano.compile.mode import FAST_RUN


class Param(In):
    """An input of a function, by Theano's older interface: `default` is the value of `In`."""

    def __init__(self, variable: Any, default: Any = None, name: Any = None, **kwargs: Any):
        super().__init__(variable, name, default, **kwargs)


def function(inputs: Any, outputs: Any = None, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Compile a function; outputs in a dict, with strings as keys, are returned in a dict.

    Further arguments are those of `pytensor.function`, which are Theano's.
    """
    keys = sorted(outputs) if isinstance(outputs, dict) else None
    outputs = outputs if keys is None else [outputs[key] for key in keys]
    # PyTensor deprecates the parameter, which is part of Theano's interface: scripts written for Theano pass it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The no_default_updates parameter", DeprecationWarning)
        warnings.filterwarnings("ignore", "The no_default_updates parameter", FutureWarning)
        function = pytensor.function(inputs, outputs, with_numpy_output_linker(mode), *args, **kwargs)
    return add_theano_semantics(function, keys)


def shared(value: Any, name: str | None = None, strict: bool = False, allow_downcast: Any = None, **kwargs: Any) -> Any:
    """Create a shared variable; ``broadcastable`` is a pattern of dimensions of length 1, and ``target`` is ignored."""
    kwargs.pop("target", None)
    pattern = kwargs.pop("broadcastable", None)
    if pattern is not None:
        kwargs["shape"] = tuple(1 if b else None for b in pattern)
    return pytensor.shared(value, name=name, strict=strict, allow_downcast=allow_downcast, **kwargs)
