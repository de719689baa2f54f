"""Products in bfloat16, if JAX's setting ``jax_default_matmul_precision`` requests them.

By default XLA multiplies float32 in TF32 on a GPU.  JAX applies the setting ``"bfloat16"`` on TPUs only; here it also
applies to GPUs:

- A product gets its factors in bfloat16, accumulates in float32, and rounds its result.  The result is thus written and
  read in half the bytes.  Gradients of weight matrices, and outputs of the graph, stay float32.
- A node that computes such a factor by one kernel, as elementwise nodes do, rounds its output.  XLA then writes it to
  memory once, in bfloat16.  This matters because convolutional networks are limited by memory bandwidth.

Ops of this library have attributes for this: ``is_product``, ``is_single_kernel`` (one kernel writes its output) and
``bfloat16_inputs`` (positions of inputs that it reads in bfloat16 without multiplying).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from synkhronos.variable_types import Array, FunctionGraph, Node, Op, Variable

#: Compiler options for graphs with rounded values.  With XLA's default, a kernel would use the unrounded number where
#: it is available, and both would be written to memory.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def is_bfloat16_requested() -> bool:
    """Whether JAX's setting requests products in bfloat16."""
    import jax

    return bool(jax.config.jax_default_matmul_precision == "bfloat16")


def round_product_factors(run: Callable[..., Any], node: Node, graph: FunctionGraph) -> Callable[..., Any]:
    """Wrap the JAX function of a node so that it rounds factors of products to bfloat16.

    Products accumulate in float32.  Results of products may be bfloat16, so outputs may have another dtype than in the
    graph.  Outputs of the graph are not rounded, so new values of parameters keep full precision.
    """
    if _is_product(node.op):
        return _multiply_in_bfloat16(run, node, _is_result_rounded(node.outputs[0], graph))
    rounded_inputs = [
        i for i, x in enumerate(node.inputs) if i in _list_rounded_positions(node.op) and _is_rounded(x, graph)
    ]
    if rounded_inputs:
        run = _pass_in_bfloat16(run, rounded_inputs)
    rounds_output = [_is_rounded(output, graph) for output in node.outputs]
    if rounds_output == [True]:
        return lambda *inputs: _round(run(*inputs))
    if any(rounds_output):
        return lambda *inputs: [
            _round(output) if rounds else output for output, rounds in zip(run(*inputs), rounds_output, strict=True)
        ]
    return run


def has_products(graph: FunctionGraph) -> bool:
    """Whether a graph contains products, perhaps in the inner graph of one of its nodes, such as a loop."""
    return any(
        _is_product(node.op) or (getattr(node.op, "fgraph", None) is not None and has_products(node.op.fgraph))
        for node in graph.apply_nodes
    )


def _is_product(op: Op) -> bool:
    """Whether an Op computes sums of products of its first two inputs."""
    from pytensor.tensor.blas import BatchedDot
    from pytensor.tensor.blockwise import Blockwise
    from pytensor.tensor.math import Dot

    core = op.core_op if isinstance(op, Blockwise) else op
    return isinstance(core, Dot | BatchedDot) or getattr(op, "is_product", False)


def _is_single_kernel(op: Op) -> bool:
    """Whether one kernel writes an Op's output, so that XLA can round it there."""
    from pytensor.tensor.elemwise import Elemwise

    return isinstance(op, Elemwise) or getattr(op, "is_single_kernel", False)


def _list_rounded_positions(op: Op) -> Sequence[int]:
    """Return the positions of an Op's inputs that may be rounded to bfloat16."""
    return (0, 1) if _is_product(op) else getattr(op, "bfloat16_inputs", ())


def _is_rounded(variable: Variable, graph: FunctionGraph) -> bool:
    """Whether the node that computes a variable rounds it: a float32 that is a factor of a product."""
    if getattr(variable.type, "dtype", None) != "float32" or variable in graph.outputs:
        return False
    if variable.owner is None or not _is_single_kernel(variable.owner.op):
        return False
    return any(i in _list_rounded_positions(client.op) for client, i in graph.clients[variable])


def _is_result_rounded(variable: Variable, graph: FunctionGraph) -> bool:
    """Whether the result of a product is rounded.

    A result is not rounded if an output of the graph has its elements, or elementwise functions of them.  Gradients of
    parameters and predictions are such outputs, but losses are not.  Nor is a result rounded that is only summed, since
    XLA can make a sum over a batch of products one product.
    """
    from pytensor.graph.fg import Output
    from pytensor.tensor.basic import Join
    from pytensor.tensor.elemwise import DimShuffle
    from pytensor.tensor.math import Sum
    from pytensor.tensor.reshape import JoinDims, SplitDims
    from pytensor.tensor.shape import Reshape, SpecifyShape
    from pytensor.tensor.subtensor import Subtensor

    moving_ops = DimShuffle | Join | JoinDims | Reshape | SpecifyShape | SplitDims | Subtensor
    if all(isinstance(client.op, Sum) for client, _ in graph.clients[variable]):
        return False
    reached, unvisited = {variable}, [variable]
    while unvisited:
        for client, _ in graph.clients[unvisited.pop()]:
            if isinstance(client.op, Output):
                return False
            if _is_single_kernel(client.op) or isinstance(client.op, moving_ops):
                unvisited += set(client.outputs) - reached
                reached.update(client.outputs)
    return True


def _pass_in_bfloat16(run: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """Wrap an Op's function so that it gets some inputs in bfloat16.  Their values are already rounded."""
    import jax.numpy as jnp

    return lambda *inputs: run(*[x.astype(jnp.bfloat16) if i in positions else x for i, x in enumerate(inputs)])


def _multiply_in_bfloat16(run: Callable[..., Any], node: Node, rounds_result: bool) -> Callable[..., Any]:
    """Wrap the function of a product so that it rounds the factors, and possibly the result, to bfloat16."""
    import jax.numpy as jnp
    from pytensor.tensor.blas import BatchedDot
    from pytensor.tensor.blockwise import Blockwise
    from pytensor.tensor.math import Dot

    if node.outputs[0].type.dtype != "float32":
        return run
    dtype = jnp.bfloat16 if rounds_result else jnp.float32
    if isinstance(node.op, Dot):
        product: Callable[..., Any] = partial(jnp.dot, preferred_element_type=dtype)
    elif isinstance(node.op, BatchedDot | Blockwise):
        product = partial(jnp.matmul, preferred_element_type=dtype)
    else:
        product = run

    def multiply(*inputs: Any) -> Array:
        return product(*[x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in inputs])

    return multiply


def _round(x: Array) -> Array:
    """Return an array with values rounded to bfloat16, in its own dtype."""
    import jax.numpy as jnp

    return x.astype(jnp.bfloat16).astype(x.dtype)
