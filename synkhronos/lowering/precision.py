"""In which precision does XLA multiply?

`bfloat16`
    Whether products are to be computed in bfloat16.
`in_bfloat16`
    Makes an Op's JAX function do so.
`COMPILER_OPTIONS`
    What XLA has to be told then.

By itself XLA multiplies float32 on a GPU in TF32.  JAX's setting ``jax_default_matmul_precision`` changes that; its
value ``"bfloat16"``, which JAX itself follows on TPUs alone, is given its meaning here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["COMPILER_OPTIONS", "bfloat16", "in_bfloat16"]

#: XLA would compute with the number from before a rounding wherever it still has it, and write both to memory.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def bfloat16() -> bool:
    """Return whether JAX's setting asks for products in bfloat16."""
    import jax

    return bool(jax.config.jax_default_matmul_precision == "bfloat16")


def in_bfloat16(run: Callable[..., Any], node: Any, graph: Any) -> Callable[..., Any]:
    """Return the JAX function of an Op, a node of a graph, that multiplies in bfloat16; ``run`` does in full precision.

    Factors are rounded to bfloat16; products of matrices come out in float32, convolutions rounded to bfloat16.  Sums
    inside both are float32.  So outputs may be of another dtype than the graph says.

    What an elementwise Op computes for one that rounds it is rounded where it is computed, for all that use it.  XLA
    then writes it to memory once, in bfloat16, where it would write it in float32 as well for the others; and what
    limits convolutional networks is memory.  So Ops that don't multiply may say that they round, too: those that do
    little but read.  What a graph returns is not rounded: new values of parameters keep their digits.
    """
    if _multiplies(node.op):
        return _product(run, node)
    taken = [i for i, x in enumerate(node.inputs) if i in _rounding(node.op) and _is_rounded(x, graph)]
    if taken:
        run = _taking(run, taken)
    made = [_is_rounded(output, graph) for output in node.outputs]
    if made == [True]:
        return lambda *inputs: _rounded(run(*inputs))
    if any(made):
        return lambda *inputs: [_rounded(x) if m else x for x, m in zip(run(*inputs), made, strict=True)]
    return run


def _multiplies(op: Any) -> bool:
    """Return whether an Op multiplies arrays and sums products; one of our own says so."""
    from pytensor.tensor.blas import BatchedDot
    from pytensor.tensor.blockwise import Blockwise
    from pytensor.tensor.math import Dot

    core = op.core_op if isinstance(op, Blockwise) else op
    return isinstance(core, Dot | BatchedDot) or getattr(op, "multiplies", False)


def _is_elementwise(op: Any) -> bool:
    """Return whether an Op's output is written by one elementwise kernel; one of our own says so."""
    from pytensor.tensor.elemwise import Elemwise

    return isinstance(op, Elemwise) or getattr(op, "elementwise", False)


def _rounding(op: Any) -> Sequence[int]:
    """Return which inputs of an Op are rounded to bfloat16; one of our own says so."""
    return (0, 1) if _multiplies(op) else getattr(op, "rounded", ())


def _is_rounded(variable: Any, graph: Any) -> bool:
    """Return whether a float32 array is rounded where it is computed."""
    if getattr(variable.type, "dtype", None) != "float32" or variable in graph.outputs:
        return False
    if variable.owner is None or not _is_elementwise(variable.owner.op):
        return False
    return any(i in _rounding(client.op) for client, i in graph.clients[variable])


def _taking(run: Callable[..., Any], taken: Sequence[int]) -> Callable[..., Any]:
    """Return an Op's function that is handed some of its inputs in bfloat16, as which they were rounded."""
    import jax.numpy as jnp

    return lambda *inputs: run(*[x.astype(jnp.bfloat16) if i in taken else x for i, x in enumerate(inputs)])


def _product(run: Callable[..., Any], node: Any) -> Callable[..., Any]:
    """Return a product's function with factors rounded to bfloat16."""
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


def _rounded(x: Any) -> Any:
    """Return an array rounded to bfloat16, in its own dtype."""
    import jax.numpy as jnp

    return x.astype(jnp.bfloat16).astype(x.dtype)
