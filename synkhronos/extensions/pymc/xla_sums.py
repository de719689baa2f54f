"""Sums over rows in functions that XLA compiles.

There are two lowerings of a sum to JAX::

    in an SPMD program    `SpmdSums`     each rank adds its rows, and the program makes the all-reduce
    in this process       `SumOverRows`  XLA calls Python, which calls the ranks

JAX can differentiate both.  The forward pass computes the gradients with the sums, so that they need one all-reduce, or
one call of Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from synkhronos.engines.xla.spmd_program import SpmdProgram
from synkhronos.extensions.rows_sum import SumOverRows
from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.library import get_storage
from synkhronos.ranks import Session
from synkhronos.replication.replicator import distribute_variables
from synkhronos.variable_types import Array, FunctionGraph, Node

__all__ = ["SpmdSums", "register_lowerings", "replace_sums"]


class RankSumGraph(NamedTuple):
    """The graph of a sum over one rank's rows."""

    #: The parameters, then the rows.
    inputs: list[Variable]
    total: Variable
    #: Positions of the parameters that the sum can be differentiated by.
    float_positions: list[int]
    #: Keys of the shared variables with the rows among a rank's objects.
    row_keys: tuple[Any, ...]


class SpmdSums(Op):
    """Several sums over rows, in an SPMD program: each rank adds its rows, and one all-reduce adds the ranks' sums.

    Parameters
    ----------
    graphs : list of RankSumGraph
        The Op takes the parameters of all, one after the other, and returns one sum for each.
    """

    def __init__(self, graphs: Sequence[RankSumGraph]):
        self.graphs = list(graphs)

    def make_node(self, *params: Any) -> Apply:
        """Return a node for these parameters."""
        return Apply(self, list(params), [graph.total.type() for graph in self.graphs])

    def perform(self, node: Node, inputs: Sequence[Array], output_storage: list[list[Any]]) -> None:
        """Raise NotImplementedError: the Op has a lowering to JAX only."""
        raise NotImplementedError("SpmdSums is computed by XLA only")

    def do_constant_folding(self, fgraph: FunctionGraph, node: Node) -> bool:
        """Return False: only the ranks' programs can compute it."""
        return False


def replace_sums(variable: Variable, session: Session) -> Any:
    """Replace each `SumOverRows` in a graph by a `SpmdSums` of rows on this session's ranks.

    Sums that do not depend on each other are one node, and so make one all-reduce.  The order of several all-reduces
    then follows from the data.
    """
    while True:
        nodes = get_library(variable).sort_nodes([variable])
        sum_nodes: list[Apply] = []
        dependent: set[Variable] = set()
        for node in nodes:
            if dependent.isdisjoint(node.inputs) and not isinstance(node.op, SumOverRows):
                continue
            if dependent.isdisjoint(node.inputs):
                sum_nodes.append(node)
            dependent.update(node.outputs)
        if not sum_nodes:
            return variable
        op = SpmdSums([_make_graph(node.op, session) for node in sum_nodes])
        results = op(*[value for node in sum_nodes for value in node.inputs], return_list=True)
        replacements = {node.outputs[0]: result for node, result in zip(sum_nodes, results, strict=True)}
        variable = replace_variables(variable, nodes, replacements)


def _make_graph(op: SumOverRows, session: Session) -> RankSumGraph:
    op.sum.scatter_rows()
    inputs, total, shareds = op.sum.make_local_graph()
    return RankSumGraph(inputs, total, op.sum.float_positions, distribute_variables(session, shareds))


def register_lowerings() -> None:
    """Register the lowerings to JAX with PyTensor, whose module for them imports JAX."""
    from pytensor.link.jax.dispatch import jax_funcify

    jax_funcify.register(SpmdSums)(_lower_spmd_sums)
    jax_funcify.register(SumOverRows)(_lower_sum_over_rows)


def _lower_spmd_sums(op: SpmdSums, **_: Any) -> Callable[..., Any]:
    """Return the sums as a function of JAX arrays."""
    import jax
    import jax.numpy as jnp

    program = SpmdProgram.current
    if program is None:
        raise RuntimeError("SpmdSums can be lowered to JAX only in an SPMD program")
    functions = []
    for graph in op.graphs:
        rows = [get_storage(program.rank.get_object(key))[0] for key in graph.row_keys]
        compile_function = get_library(graph.total).function
        functions.append(program.compile_for_local_rows(compile_function, graph.inputs, graph.total, rows))
    bounds = list(itertools.accumulate([len(graph.inputs) - len(graph.row_keys) for graph in op.graphs], initial=0))
    sum_by_position = {bounds[i] + k: i for i, graph in enumerate(op.graphs) for k in graph.float_positions}

    def add_local_rows(*params: Any) -> tuple[Any, ...]:
        return tuple(f(*params[bounds[i] : bounds[i + 1]]) for i, f in enumerate(functions))

    def differentiate_local_rows(*params: Any) -> Sequence[Any]:
        def add_all(*params: Any) -> Any:
            sums = add_local_rows(*params)
            return sum(sums), sums  # each parameter is that of one sum

        if not sum_by_position:
            return add_local_rows(*params)
        (_, sums), gradients = jax.value_and_grad(add_all, tuple(sum_by_position), has_aux=True)(*params)
        return *sums, *gradients

    def reduce_all(values: Sequence[Any]) -> list[Any]:
        dtype = jnp.result_type(*values)
        vector = program.all_reduce(jnp.concatenate([jnp.ravel(value).astype(dtype) for value in values]))
        parts = jnp.split(vector, np.cumsum([value.size for value in values])[:-1].tolist())
        return [part.reshape(v.shape).astype(v.dtype) for part, v in zip(parts, values, strict=True)]

    compute = _make_differentiable(
        lambda *params: reduce_all(add_local_rows(*params)),
        lambda *params: reduce_all(differentiate_local_rows(*params)),
        sum_by_position,
    )
    return compute if len(functions) > 1 else lambda *params: compute(*params)[0]


def _lower_sum_over_rows(op: SumOverRows, **_: Any) -> Callable[..., Any]:
    """Return a sum as a function of JAX arrays that calls the ranks from this process."""
    import jax

    distributed_sum, positions = op.sum, op.sum.float_positions

    def call(with_gradients: bool, *params: Any) -> Any:
        def compute(*arrays: Any) -> list[np.ndarray]:
            # NumPy arrays, so that callbacks compute on the CPU: a GPU is blocked until the callback has returned.
            point = [np.asarray(array) for array in arrays]
            return distributed_sum.evaluate(point, True) if with_gradients else [distributed_sum.compute_value(point)]

        differentiable = [params[i] for i in positions if with_gradients]
        specs = [jax.ShapeDtypeStruct(param.shape, param.dtype) for param in differentiable]
        total_spec = jax.ShapeDtypeStruct((), distributed_sum.total.type.dtype)
        return jax.pure_callback(compute, [total_spec, *specs], *params, vmap_method="sequential")

    compute_sums = _make_differentiable(partial(call, False), partial(call, True), dict.fromkeys(positions, 0))
    return lambda *params: compute_sums(*params)[0]


def _make_differentiable(
    compute_sums: Callable[..., Sequence[Any]],
    compute_sums_and_gradients: Callable[..., Sequence[Any]],
    sum_by_position: Mapping[int, int],
) -> Callable[..., tuple[Any, ...]]:
    """Return a function that computes sums from JAX arrays, and that JAX can differentiate.

    ``sum_by_position`` maps the position of each parameter with a gradient to the number of its sum.  The gradients are
    those of these parameters, in this order.
    """
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def compute(*params: Any) -> tuple[Any, ...]:
        return tuple(compute_sums(*params))

    def forward(*params: Any) -> tuple[Any, Any]:
        results = compute_sums_and_gradients(*params)
        n_sums = len(results) - len(sum_by_position)
        return tuple(results[:n_sums]), (results[n_sums:], params)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        gradients, params = residuals
        gradient_by_position = dict(zip(sum_by_position, gradients, strict=True))
        return tuple(
            cotangents[sum_by_position[i]] * gradient_by_position[i]
            if i in sum_by_position
            else np.zeros(np.shape(param), jax.dtypes.float0)
            for i, param in enumerate(params)
        )

    compute.defvjp(forward, backward)
    return lambda *params: compute(*map(jnp.asarray, params))
