"""PyTensor's JAX mode, in which lengths may follow from the values of integer inputs.

A function's lengths are found by `lengths.extract_lengths` and become static arguments of the compiled function;
`shapes` keeps lengths numbers while JAX traces.
"""

from __future__ import annotations

from typing import Any

from pytensor.compile.mode import Mode, get_mode
from pytensor.link.jax.linker import JAXLinker

import synkhronos.lowering.slices  # noqa: F401 - registers a rewrite
from synkhronos.lowering.lengths import extract_lengths
from synkhronos.lowering.shapes import register_lowerings

__all__ = ["LengthLinker", "to_strong_array", "use_length_linker"]


class LengthLinker(JAXLinker):
    """PyTensor's JAX mode, in which lengths may follow from integer inputs.

    What it compiles has an attribute ``extract_lengths``: the `LengthGraph` that it computes, or None.
    """

    # XLA fuses by itself.  PyTensor would fuse a length with the data that are divided by it, and it could not be cut
    # out.
    incompatible_rewrites = (*JAXLinker.incompatible_rewrites, "fusion")

    def fgraph_convert(self, fgraph: Any, input_storage: Any, storage_map: Any, **kwargs: Any) -> Any:
        """Convert the graph; where there are such lengths, what was made of it."""
        from pytensor.link.jax.dispatch import jax_funcify

        register_lowerings()
        function = super().fgraph_convert(fgraph, input_storage, storage_map, **kwargs)
        self._length_graph = extract_lengths(fgraph)  # after it: it copies random generators
        if self._length_graph is not None:
            function = jax_funcify(self._length_graph.graph)
        dtypes = [getattr(output.type, "dtype", None) for output in fgraph.outputs]
        return (lambda *inputs: tuple(map(to_strong_array, function(*inputs), dtypes))) if dtypes else function

    def jit_compile(self, fn: Any) -> Any:
        """Compile, with the lengths as constants."""
        import jax

        plan = self._length_graph
        if plan is None:
            compiled = jax.jit(fn)

            def run(*values: Any) -> Any:
                return compiled(*values)
        else:
            n = len(plan.graph.inputs)
            compiled = jax.jit(fn, static_argnums=tuple(range(n - plan.n_lengths, n)))

            def run(*values: Any) -> Any:
                return compiled(*values, *plan.lengths(values))

        run.length_graph, run.compiled = plan, compiled  # type: ignore[attr-defined]
        return run


def to_strong_array(value: Any, dtype: str | None) -> Any:
    """Return a result as an array of a dtype of its own.

    Lengths are Python's integers within a graph.  And the dtype of what is computed from these and constants alone is
    "weak" to JAX: another one than what the variable that it updates had before, so that all is compiled once more.
    """
    import jax
    import jax.numpy as jnp

    is_weak = isinstance(value, bool | int | float | complex) or getattr(value, "weak_type", False)
    return jnp.asarray(value, jax.dtypes.canonicalize_dtype(dtype)) if is_weak and dtype is not None else value


def use_length_linker(mode: Any) -> Any:
    """Return a mode, with `LengthLinker` in the place of PyTensor's if it is JAX mode."""
    found = get_mode(mode)
    return Mode(LengthLinker(), found.provided_optimizer) if type(found.linker) is JAXLinker else mode
