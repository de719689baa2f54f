"""PyTensor's JAX linker, extended by lengths that depend on the values of integer inputs.

`lengths.extract_lengths` makes them static arguments of the compiled function.  Other lengths remain numbers while JAX
traces (`shapes`).
"""

from __future__ import annotations

import warnings
from typing import Any

from pytensor.compile.mode import Mode, get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.link.jax.linker import JAXLinker
from pytensor.tensor.random.type import RandomType

from synkhronos.lowering.lengths import extract_lengths
from synkhronos.lowering.random_keys import JAX_KEY, get_key_storage, share_key_storage
from synkhronos.lowering.shapes import register_shape_lowerings
from synkhronos.lowering.sum_rewrites import SUM_REWRITES
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.variable_types import FunctionGraph

#: Name of the rewrite that decomposes the Ops of attention, for all modes but JAX mode.
DECOMPOSE_ATTENTION = "decompose_attention"


class StaticLengthLinker(JAXLinker):
    """JAX linker whose functions draw from the keys of shared generators (`random_keys`).

    They have an attribute ``length_graph``: a `StaticLengthGraph`, or None.
    """

    required_rewrites = (*JAXLinker.required_rewrites, SUM_REWRITES)
    # XLA fuses as well.  PyTensor would fuse a length with data that are divided by it; then it can't be extracted.
    # Nor can a length within a branch, for which PyTensor 3.3 makes an inner graph: both branches are computed.
    incompatible_rewrites = (
        *JAXLinker.incompatible_rewrites,
        *("fusion", "introduce_lazy_ifelse", DECOMPOSE_ATTENTION),
    )

    def fgraph_convert(self, fgraph: FunctionGraph, input_storage: Any, storage_map: Any, **kwargs: Any) -> Any:
        """Convert the graph, or its `StaticLengthGraph` if it has one, to a JAX function."""
        from pytensor.link.jax.dispatch import jax_funcify

        register_shape_lowerings()
        # PyTensor's conversion treats an input that has a value as a constant, and keeps the value on the device.
        storages = [storage_map[v] for v in fgraph.inputs if hasattr(storage_map[v][0], "dtype")]
        values = [storage[0] for storage in storages]
        generators = {
            i: v.container
            for i, v in enumerate(fgraph.inputs)
            if isinstance(v, SharedVariable) and isinstance(v.type, RandomType)
        }
        self._key_storages = {i: get_key_storage(container) for i, container in generators.items()}
        try:
            for storage in storages:
                storage[0] = None
            # After a fork JAX has float64, as before it only with floatX=float64.  Results must not depend on this.
            kwargs["keeps_dtypes"] = True
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The RandomType SharedVariables")  # PyTensor's copies are not used
                function = super().fgraph_convert(fgraph, input_storage, storage_map, **kwargs)
        finally:
            for storage, value in zip(storages, values, strict=True):
                storage[0] = value
        for i, container in generators.items():
            share_key_storage(container, fgraph.inputs[i].container)
        self._length_graph = extract_lengths(fgraph)  # last: the conversion replaces random generators by copies
        if self._length_graph is not None:
            function = jax_funcify(self._length_graph.graph, keeps_dtypes=True)
        dtypes = [getattr(output.type, "dtype", None) for output in fgraph.outputs]
        return (lambda *inputs: tuple(map(to_graph_dtype, function(*inputs), dtypes))) if dtypes else function

    def jit_compile(self, fn: Any) -> Any:
        """Compile a JAX function with the lengths as static arguments."""
        import jax

        length_graph = self._length_graph
        n_inputs, n_lengths = len(self.fgraph.inputs), 0 if length_graph is None else length_graph.n_lengths
        compiled = jax.jit(fn, static_argnums=tuple(range(n_inputs, n_inputs + n_lengths)))

        key_storages = self._key_storages
        updates = (self.fgraph.update_mapping or {}).items()
        new_keys = [(position, key_storages[i]) for position, i in updates if i in key_storages]

        def run(*values: Any) -> Any:
            arguments = list(values)
            for i, storage in key_storages.items():
                arguments[i] = {**arguments[i], JAX_KEY: storage[0]}
            lengths = () if length_graph is None else length_graph.compute_lengths(values)
            with defer_signals():  # an interrupt while JAX traces could leave its current trace set
                results = compiled(*arguments, *lengths)
            for position, storage in new_keys:
                storage[0] = results[position][JAX_KEY]
            return results

        run.length_graph, run.compiled = length_graph, compiled  # type: ignore[attr-defined]
        return run


def to_graph_dtype(value: Any, dtype: str | None) -> Any:
    """Convert an output to an array of its dtype in the graph, unless that is None.

    An update by a value of another type would change the variable's type, and JAX would compile the function again:

    - Lengths are Python numbers within a graph.
    - The dtype of an array that was computed from numbers alone is "weak" in JAX.
    - JAX computes some float32 graphs in float64, such as the gradient of a norm.
    """
    import jax

    if dtype is None:
        return value
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return value.astype(dtype) if hasattr(value, "astype") else jax.numpy.asarray(value, dtype)


def with_static_length_linker(mode: Mode) -> Mode:
    """Return a mode with `StaticLengthLinker` in place of PyTensor's JAX linker.  Return any other mode unchanged."""
    resolved = get_mode(mode)
    return Mode(StaticLengthLinker(), resolved.provided_optimizer) if type(resolved.linker) is JAXLinker else mode
