"""Compiled functions and their inputs with Theano's semantics: default values, outputs in a dict, NumPy results."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.compile.io
from pytensor.compile.executor import Function as _Function
from pytensor.compile.mode import Mode, get_mode, predefined_modes
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.link.basic import Container
from pytensor.link.jax.linker import JAXLinker
from pytensor.tensor.type import TensorType

from synkhronos.compat import synced_values
from synkhronos.lowering import linker


class In(pytensor.compile.io.In):
    """An input of a function, which may have a default value.

    Parameters
    ----------
    variable : variable
    name : str, optional
        Keyword of the input; the variable's name by default.
    value : optional
        Default value.
    update : variable, optional
        New value of `value` for the next call.
    **kwargs
        Further arguments of PyTensor's ``In``: ``mutable``, ``strict``, ``allow_downcast``, ``borrow``, ...

    Examples
    --------
    >>> x, rate = T.dscalars("x", "rate")
    >>> f = theano.function([x, theano.In(rate, value=0.5)], x * rate)
    >>> float(f(4)), float(f(4, 2)), float(f(4, rate=3)), float(f(4))
    (2.0, 8.0, 12.0, 2.0)
    """

    def __init__(self, variable: Any, name: Any = None, value: Any = None, update: Any = None, **kwargs: Any):
        is_pytensor_value = value is None or isinstance(value, Container | SharedVariable)
        super().__init__(variable, name, value if is_pytensor_value else None, update, **kwargs)
        #: The default value in a list of one; empty if there is none.
        self.default_list: list[Any] = []
        if not is_pytensor_value:
            value = variable.type.filter(value, strict=self.strict, allow_downcast=self.allow_downcast)
            self.value, self.default_list = value, [value]


class TheanoFunction(_Function):
    """A compiled function of PyTensor with features of Theano's: default values of inputs, and outputs in a dict."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function.  A value passed for an input with a default applies to this call only."""
        try:
            outputs = super().__call__(*args, **kwargs)
        finally:
            self._restore_defaults()
        output_keys = _get_output_keys(self)
        return outputs if output_keys is None else dict(zip(output_keys, outputs, strict=True))

    def _restore_defaults(self) -> None:
        for container, input_spec in zip(self.input_storage, self.maker.inputs, strict=True):
            if getattr(input_spec, "default_list", ()) and input_spec.update is None:
                container.storage[0] = (
                    copy.copy(input_spec.default_list[0]) if input_spec.mutable else input_spec.default_list[0]
                )

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy.  The arguments are those of PyTensor's method."""
        return add_theano_semantics(super().copy(*args, **kwargs), _get_output_keys(self))


copyreg.pickle(
    TheanoFunction, lambda f: (_unpickle_function, (copyreg.dispatch_table[_Function](f), _get_output_keys(f)))
)


def _unpickle_function(reduced: tuple[Callable[..., Any], tuple[Any, ...]], output_keys: list[str] | None) -> Any:
    """Return a `TheanoFunction` from the constructor of a PyTensor function, its arguments, and the output keys."""
    make_function, arguments = reduced
    return add_theano_semantics(make_function(*arguments), output_keys)


def _get_output_keys(function: Any) -> list[str] | None:
    return getattr(function.maker, "output_keys", None)


def add_theano_semantics(function: Any, output_keys: list[str] | None = None) -> Any:
    """Make a function of PyTensor a `TheanoFunction`, if its inputs have default values or its outputs have keys.

    With ``output_keys``, it returns its outputs in a dict.
    """
    if output_keys is not None or any(getattr(input_spec, "default_list", ()) for input_spec in function.maker.inputs):
        function.maker.output_keys = output_keys
        function.__class__ = TheanoFunction
        function._restore_defaults()
    return function


class NumpyOutputLinker(linker.StaticLengthLinker):
    """JAX linker whose functions return writable NumPy arrays in the dtypes of the graph."""

    def jit_compile(self, fn: Any) -> Any:
        """Compile a JAX function.  New values of shared variables stay JAX arrays."""
        compiled = super().jit_compile(fn)
        updates = set(self.fgraph.update_mapping or ())
        dtypes = [
            None if i in updates or not isinstance(output.type, TensorType) else output.type.dtype
            for i, output in enumerate(self.fgraph.outputs)
        ]

        if not dtypes:  # JAX's function returns None
            return compiled

        def run(*values: Any) -> list[Any]:
            results = zip(compiled(*values), dtypes, strict=True)
            return [result if dtype is None else np.array(result, dtype) for result, dtype in results]

        run.length_graph, run.compiled = compiled.length_graph, compiled.compiled  # type: ignore[attr-defined]
        return run


def with_numpy_output_linker(mode: Any) -> Any:
    """Return JAX mode with `NumpyOutputLinker` as its linker.  Return any other mode unchanged."""
    resolved_mode = get_mode(mode)
    is_jax = type(resolved_mode.linker) in (JAXLinker, linker.StaticLengthLinker)
    return Mode(NumpyOutputLinker(), resolved_mode.provided_optimizer) if is_jax else mode


def patch_pytensor() -> None:
    """Patch PyTensor: JAX mode and ``get_value`` return NumPy arrays, and values have a method ``sync``."""
    predefined_modes["JAX"] = with_numpy_output_linker(predefined_modes["JAX"])
    synced_values.add_sync_method(Container, SharedVariable)
