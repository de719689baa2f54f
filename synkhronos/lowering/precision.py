"""Products in bfloat16, if JAX's setting ``jax_default_matmul_precision`` requests them.

By default XLA multiplies float32 in TF32 on a GPU.  JAX follows the setting's value ``"bfloat16"`` on TPUs alone; here
it also applies to GPUs.  Two decisions are made for each node of a graph:

- A node that multiplies gets its factors in bfloat16 and accumulates in float32.
- An elementwise node whose output is such a factor rounds it where it is computed, so that XLA writes it to memory
  once, in bfloat16.  Convolutional networks are limited by memory bandwidth.

An Op of our own declares its part by attributes: ``multiplies``, ``elementwise`` (one kernel writes its output) and
``rounded`` (positions of inputs that it reads in bfloat16 without multiplying).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["COMPILER_OPTIONS", "computes_in_bfloat16", "round_to_bfloat16"]

#: Compiler options for graphs with rounded values: otherwise XLA would use the number from before the rounding wherever
#: it is available, and write both to memory.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def computes_in_bfloat16() -> bool:
    """Whether JAX's setting asks for products in bfloat16."""
    import jax

    return bool(jax.config.jax_default_matmul_precision == "bfloat16")


def round_to_bfloat16(run: Callable[..., Any], node: Any, graph: Any) -> Callable[..., Any]:
    """Wrap the JAX function of a node so that it rounds factors of products to bfloat16.

    Products of matrices are float32; convolutions are rounded to bfloat16.  Both accumulate in float32.  Outputs may
    therefore have another dtype than in the graph.  Outputs of the graph are not rounded, so that new values of
    parameters keep full precision.

    Parameters
    ----------
    run : callable
        JAX function of the node's Op in full precision.
    node : Apply
    graph : FunctionGraph
        Graph of the node.
    """
    if _is_product(node.op):
        return _multiply_in_bfloat16(run, node)
    rounded_inputs = [
        i for i, x in enumerate(node.inputs) if i in _list_rounded_positions(node.op) and _is_rounded(x, graph)
    ]
    if rounded_inputs:
        run = _pass_in_bfloat16(run, rounded_inputs)
    rounds = [_is_rounded(output, graph) for output in node.outputs]
    if rounds == [True]:
        return lambda *inputs: _round(run(*inputs))
    if any(rounds):
        return lambda *inputs: [_round(x) if r else x for x, r in zip(run(*inputs), rounds, strict=True)]
    return run


def _is_product(op: Any) -> bool:
    """Whether an Op computes sums of products of its first two inputs."""
    from pytensor.tensor.blas import BatchedDot
    from pytensor.tensor.blockwise import Blockwise
    from pytensor.tensor.math import Dot

    core = op.core_op if isinstance(op, Blockwise) else op
    return isinstance(core, Dot | BatchedDot) or getattr(op, "multiplies", False)


def _is_elementwise(op: Any) -> bool:
    """Whether one elementwise kernel writes an Op's output."""
    from pytensor.tensor.elemwise import Elemwise

    return isinstance(op, Elemwise) or getattr(op, "elementwise", False)


def _list_rounded_positions(op: Any) -> Sequence[int]:
    """Return the positions of an Op's inputs that may be rounded to bfloat16."""
    return (0, 1) if _is_product(op) else getattr(op, "rounded", ())


def _is_rounded(variable: Any, graph: Any) -> bool:
    """Whether a variable is rounded where it is computed: a float32 output of an elementwise node that is a factor."""
    if getattr(variable.type, "dtype", None) != "float32" or variable in graph.outputs:
        return False
    if variable.owner is None or not _is_elementwise(variable.owner.op):
        return False
    return any(i in _list_rounded_positions(client.op) for client, i in graph.clients[variable])


def _pass_in_bfloat16(run: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """Wrap an Op's function to pass some inputs in bfloat16; their values have been rounded before."""
    import jax.numpy as jnp

    return lambda *inputs: run(*[x.astype(jnp.bfloat16) if i in positions else x for i, x in enumerate(inputs)])


def _multiply_in_bfloat16(run: Callable[..., Any], node: Any) -> Callable[..., Any]:
    """Wrap the function of a product to round its factors to bfloat16."""
    import jax.numpy as jnp
    from pytensor.tensor.blas import BatchedDot
    from pytensor.tensor.blockwise import Blockwise
    from pytensor.tensor.math import Dot

    if node.outputs[0].type.dtype != "float32":
        return run
    if isinstance(node.op, Dot):
        product: Any = lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32)  # noqa: E731
    elif isinstance(node.op, BatchedDot | Blockwise):
        product = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32)  # noqa: E731
    else:
        product = run

    def multiply(*inputs: Any) -> Any:
        return product(*[x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in inputs])

    return multiply


def _round(x: Any) -> Any:
    """Round an array to bfloat16 and keep its dtype."""
    import jax.numpy as jnp

    return x.astype(jnp.bfloat16).astype(x.dtype)
