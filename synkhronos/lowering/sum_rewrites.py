"""Rewrites of sums by which XLA needs fewer passes over memory, in JAX mode.

PyTensor simplifies a graph for loops on a CPU, in two ways that cost a GPU time in the backward pass of a residual
network:

- It flattens sums of sums.  The gradient of each block then is a sum of all terms of all later blocks.  It could be the
  gradient of the next block and a few terms.  `PartialSumRewriter` reuses the sum of the next block.
- The gradient of ``x - mean(x)`` subtracts a mean of terms that themselves depend on a sum over the same axis, and XLA
  reads all arrays twice.  `split_centered_sums` sums these terms separately, in the first pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import UnionType
from typing import Any

import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import GraphRewriter, in2out, node_rewriter
from pytensor.scalar.basic import Add, Mul, Sub, TrueDiv
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum

from synkhronos.variable_types import Node, Variable

#: Tag of the rewrites in PyTensor's database.
SUM_REWRITES = "synkhronos_sums"


def is_elementwise(node: Node | None, scalar_op: type | UnionType) -> bool:
    """Whether a node applies a scalar function elementwise.  None, the owner of an input, does not."""
    return node is not None and isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar_op)


class PartialSumRewriter(GraphRewriter):
    """Rewrite that replaces terms of a sum by another sum of them, ``a + b + c`` by ``(a + b) + c``.

    Both sums have one dtype: a sum of int8 could overflow, and a sum of booleans is a logical or.
    """

    def apply(self, fgraph: FunctionGraph) -> None:
        """Rewrite a graph in place, the longest sums first, since their terms are those of the shorter ones."""
        for node in reversed(fgraph.toposort()):
            while is_elementwise(node, Add) and (partial := _find_partial_sum(fgraph, node)) is not None:
                rest = Counter(node.inputs) - Counter(partial.inputs)
                total = node.op(partial.outputs[0], *rest.elements())
                fgraph.replace(node.outputs[0], total, reason="share_partial_sums")
                node = total.owner


def _find_partial_sum(fgraph: FunctionGraph, node: Node) -> Any:
    """Return the node of the largest sum of some of the node's terms that is also computed in its dtype, or None."""
    terms = Counter(node.inputs)
    clients = {client for term in terms for client, _ in fgraph.clients[term] if client is not node}
    dtype = node.outputs[0].type.dtype
    sums = [
        client
        for client in clients
        if is_elementwise(client, Add)
        and client.outputs[0].type.dtype == dtype
        and len(client.inputs) < len(node.inputs)
    ]
    return max((c for c in sums if Counter(c.inputs) <= terms), key=lambda c: len(c.inputs), default=None)


@node_rewriter([Sum])
def _rewrite_centered_sum(fgraph: FunctionGraph, node: Node) -> list[Any] | None:
    """Replace ``sum(a + c * (x - mean(x)))`` by ``sum(a) + c * sum(x - mean(x))``, where c has no summed axis.

    All terms are added in the dtype of the whole sum.
    """
    (total,) = node.inputs
    axes = node.op.axis
    if axes is None or not is_elementwise(total.owner, Add):
        return None
    plain, centered = [], []
    for term in total.owner.inputs:
        rest, factors = _match_factors(term, axes)
        if factors and _is_centered(rest, axes):
            centered.append((rest, factors))
        else:
            plain.append(pt.cast(term, total.type.dtype))
    if not plain or not centered:
        return None
    parts = [pt.add(*plain) if len(plain) > 1 else plain[0], *(rest for rest, _ in centered)]
    if any(part.type.broadcastable[axis] != total.type.broadcastable[axis] for part in parts for axis in axes):
        return None  # the sum counts each element of the part several times
    sums = [node.op(part) for part in parts]
    for i, (_, factors) in enumerate(centered, start=1):
        for factor, is_divisor in factors:
            factor = factor.squeeze(axis=axes) if factor.type.ndim else factor
            sums[i] = sums[i] / factor if is_divisor else sums[i] * factor
    return [pt.cast(pt.add(*sums), node.outputs[0].type.dtype)]


def _match_factors(term: Variable, axes: tuple[int, ...]) -> tuple[Variable, list[tuple[Variable, bool]]]:
    """Split a term into a factor that varies along the axes, and a list of its other factors.

    Each of these has a flag: True for a divisor.
    """
    factors: list[tuple[Any, bool]] = []
    while term.owner is not None:
        if is_elementwise(term.owner, TrueDiv) and _is_constant_along(term.owner.inputs[1], axes):
            term, divisor = term.owner.inputs
            factors.append((divisor, True))
            continue
        if not is_elementwise(term.owner, Mul):
            break
        rest = [x for x in term.owner.inputs if not _is_constant_along(x, axes)]
        if len(rest) != 1:
            break
        factors += [(x, False) for x in term.owner.inputs if x is not rest[0]]
        (term,) = rest
    return term, factors


def _is_centered(variable: Variable, axes: tuple[int, ...]) -> bool:
    """Whether a variable is a difference between another one and a multiple of its sum over the axes."""
    node = variable.owner
    if not is_elementwise(node, Sub) or not _is_constant_along(node.inputs[1], axes):
        return False
    minuend, unvisited = node.inputs[0], [node.inputs[1]]
    while unvisited:
        owner = unvisited.pop().owner
        if owner is None:
            continue
        if isinstance(owner.op, Sum) and owner.op.axis == axes and owner.inputs[0] is minuend:
            return True
        if isinstance(owner.op, DimShuffle) or is_elementwise(owner, Mul) or is_elementwise(owner, TrueDiv):
            unvisited += owner.inputs
    return False


def separate_statistics(run: Callable[..., Any], node: Node, graph: FunctionGraph) -> Callable[..., Any]:
    """Wrap the JAX function of a sum if a mean or a variance is computed from it by which values are normalized.

    XLA would compute normalizations by kernels that each have one output and compute the statistics again.  Behind a
    barrier, statistics are computed once for the forward and the backward pass.
    """
    import jax

    if not isinstance(node.op, Sum) or node.op.axis is None:
        return run
    (x,), axes = node.inputs, node.op.axis
    is_mean = any(_is_centered(out, axes) for client, _ in graph.clients[x] for out in client.outputs)
    factors = x.owner.inputs if x.owner is not None and isinstance(x.owner.op, Elemwise) else []
    if is_mean or any(_is_centered(factor, axes) for factor in factors):
        return lambda x: jax.lax.optimization_barrier(run(x))
    return run


def _is_constant_along(variable: Variable, axes: tuple[int, ...]) -> bool:
    return all(variable.type.broadcastable[axis] for axis in axes)


split_centered_sums = in2out(_rewrite_centered_sum, name="split_centered_sums")
# After the canonical form and its specializations, at 1 to 3, and before fusion at 49, which JAX mode leaves to XLA.
# Only `linker.StaticLengthLinker` requires this tag: functions that PyTensor compiles itself are not changed.
optdb.register("split_centered_sums", split_centered_sums, SUM_REWRITES, position=48.0)
optdb.register("share_partial_sums", PartialSumRewriter(), SUM_REWRITES, position=48.1)
