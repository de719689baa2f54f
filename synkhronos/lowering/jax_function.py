"""Compiled PyTensor functions as functions of JAX arrays, for XLA to trace.

PyTensor's compiled function provides the graph and the storages.  An engine calls the JAX function itself.  So it can
fuse several functions and an all-reduce into one XLA program, and donate the arrays that are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synkhronos.devices import JAX
from synkhronos.lowering.precision import has_products, is_bfloat16_requested, round_product_factors
from synkhronos.lowering.random_keys import JAX_KEY, get_key_storage
from synkhronos.lowering.scatter import wrap_scatter_add
from synkhronos.variable_types import FunctionGraph, Node, Op

if TYPE_CHECKING:  # it imports PyTensor, and the engines import this module with Theano too
    from synkhronos.lowering.lengths import StaticLengthGraph


class JaxFunction:
    """A PyTensor function, compiled in JAX mode, as a function of JAX arrays.

    The first ``n_inputs`` inputs are passed in a call; the remaining ones are shared variables.

    Attributes
    ----------
    storages : list of list
        Storages of the shared variables, each a list with one item.  Functions that share a variable share the list.
    result_storages : list of list
        Storage of each result: a new list for each of ``n_outputs`` outputs, an item of `storages` for an update.
    output_types : list
        PyTensor's types of the outputs.
    donated_storages : list of list
        The items of `storages` whose arrays a launch may overwrite.
    length_graph : StaticLengthGraph or None
        Computes the lengths that depend on the values of inputs.
    has_products : bool
        Whether the function multiplies matrices, or convolves.
    run : callable
        Takes the inputs, the values in `storages` and the lengths, and returns a value for each of `result_storages`.
    """

    def __init__(self, function: Any, n_inputs: int):
        self.n_inputs = n_inputs
        self._thunk, self._graph = thunk, graph = function.vm, function.maker.fgraph
        specs = function.maker.expanded_inputs
        generators = {i: storage[0] for i, storage in enumerate(thunk.inputs) if isinstance(storage[0], dict)}
        inputs: list[Any] = [
            get_key_storage(specs[i].value) if i in generators else storage for i, storage in enumerate(thunk.inputs)
        ]
        new_generators = {i for i, j in graph.update_mapping.items() if j in generators}
        self.storages: list[list[Any]] = inputs[n_inputs:]
        self.result_storages: list[list[Any]] = [[None] for _ in graph.outputs]
        for position, j in graph.update_mapping.items():
            self.result_storages[position] = inputs[j]
        self.n_outputs = len(graph.outputs) - len(graph.update_mapping)
        self.output_types = [output.type for output in graph.outputs[: self.n_outputs]]
        updated = {id(storage) for storage in self.result_storages[self.n_outputs :]}
        self.donated_storages = [
            storage
            for storage in self.storages
            if id(storage) in updated and (isinstance(storage[0], np.ndarray) or JAX.owns(storage[0]))
        ]
        self.length_graph: StaticLengthGraph | None = thunk.jit_fn.length_graph
        self.has_products = has_products(graph)
        run = _convert_graph(graph if self.length_graph is None else self.length_graph.graph)
        self.run = _pass_keys_instead_of_dicts(run, generators, new_generators)

    def compute_lengths(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the lengths for given values of the inputs: arguments of `run`."""
        values = [*inputs, *[storage[0] for storage in self.storages]]
        return () if self.length_graph is None else self.length_graph.compute_lengths(values)

    def raise_with_output_node(self) -> None:
        """Raise the current exception again, with PyTensor's description of the node that computes the first output.

        The node that raised it is unknown.  Return if the graph computes no output.
        """
        from pytensor.link.utils import raise_with_op

        node = next((output.owner for output in self._graph.outputs if output.owner is not None), None)
        if node is not None:
            raise_with_op(self._graph, node, self._thunk)


def _pass_keys_instead_of_dicts(
    run: Callable[..., Any], generators: dict[int, dict[str, Any]], new_generators: set[int]
) -> Callable[..., Any]:
    """Wrap a function of random generators, which are dicts: take and return only the JAX key of each dict.

    The other five items of a dict are not used, but would be copied at each launch.  ``generators`` are the dicts, by
    position among the arguments.  ``new_generators`` are the positions of updated dicts among the results.
    """

    def run_with_keys(*arguments: Any) -> tuple[Any, ...]:
        with_dicts = [{**generators[i], JAX_KEY: a} if i in generators else a for i, a in enumerate(arguments)]
        return tuple(
            result[JAX_KEY] if i in new_generators else result for i, result in enumerate(run(*with_dicts) or ())
        )

    return run_with_keys


def _convert_graph(graph: FunctionGraph) -> Callable[..., Any]:
    """Convert a graph to a function of JAX arrays in which each value has its variable's dtype."""
    from pytensor.link.jax.dispatch import jax_funcify, jax_typify
    from pytensor.link.utils import fgraph_to_python

    from synkhronos.lowering.dtypes import keep_dtypes
    from synkhronos.lowering.linker import to_graph_dtype
    from synkhronos.lowering.sum_rewrites import separate_statistics

    in_bfloat16 = is_bfloat16_requested()

    def convert(op: Op, node: Node = None, **kwargs: Any) -> Any:
        run = jax_funcify(op, node=node, keeps_dtypes=True, **kwargs)
        if node is None or not callable(run):
            return run
        run = wrap_scatter_add(run, node)
        if in_bfloat16:
            run = round_product_factors(run, node, graph)
        return separate_statistics(keep_dtypes(run, node), node, graph)

    converted: Callable[..., Any] = fgraph_to_python(
        graph, convert, type_conversion_fn=jax_typify, fgraph_name="synkhronos_graph"
    )
    dtypes = [getattr(output.type, "dtype", None) for output in graph.outputs]
    return lambda *inputs: tuple(map(to_graph_dtype, converted(*inputs) or (), dtypes))
