"""Sums over rows in functions that XLA compiles.

There are two lowerings of a sum to JAX::

    in an SPMD program    `SpmdSums`     each rank adds its rows, and the program makes the all-reduce
    in this process       `SumOverRows`  XLA calls Python, which calls the ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from synkhronos.engines.xla.spmd_program import SpmdProgram
from synkhronos.extensions.rows_sum import DistributedSum, SumOverRows
from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.library import get_storage
from synkhronos.lowering.differentiable_sums import fuse_sums, make_callback_sum
from synkhronos.variable_types import Array, FunctionGraph, Node

__all__ = ["RankSumGraph", "SpmdSums", "register_lowerings", "replace_sums"]


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


def replace_sums(variable: Variable, make_graph: Callable[[DistributedSum], RankSumGraph]) -> Any:
    """Replace each `SumOverRows` in a graph by a `SpmdSums`.

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
        op = SpmdSums([make_graph(node.op.sum) for node in sum_nodes])
        results = op(*[value for node in sum_nodes for value in node.inputs], return_list=True)
        replacements = {node.outputs[0]: result for node, result in zip(sum_nodes, results, strict=True)}
        variable = replace_variables(variable, nodes, replacements)


def register_lowerings() -> None:
    """Register the lowerings to JAX with PyTensor, whose module for them imports JAX."""
    from pytensor.link.jax.dispatch import jax_funcify

    jax_funcify.register(SpmdSums)(_lower_spmd_sums)
    jax_funcify.register(SumOverRows)(_lower_sum_over_rows)


def _lower_spmd_sums(op: SpmdSums, **_: Any) -> Callable[..., Any]:
    """Return the sums as a function of JAX arrays."""
    program = SpmdProgram.current
    if program is None:
        raise RuntimeError("SpmdSums can be lowered to JAX only in an SPMD program")
    functions = []
    for graph in op.graphs:
        rows = [get_storage(program.rank.get_object(key))[0] for key in graph.row_keys]
        compile_function = get_library(graph.total).function
        functions.append(program.compile_for_local_rows(compile_function, graph.inputs, graph.total, rows))
    param_counts = [len(graph.inputs) - len(graph.row_keys) for graph in op.graphs]
    return fuse_sums(functions, param_counts, [graph.float_positions for graph in op.graphs], program.all_reduce)


def _lower_sum_over_rows(op: SumOverRows, **_: Any) -> Callable[..., Any]:
    """Return a sum as a function of JAX arrays that calls the ranks from this process."""
    distributed_sum = op.sum
    return make_callback_sum(
        distributed_sum.compute_value,
        distributed_sum.compute_value_and_gradients,
        distributed_sum.total.type.dtype,
        distributed_sum.float_positions,
    )
