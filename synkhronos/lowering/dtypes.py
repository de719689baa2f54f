"""Results with the dtypes of the graph, in place of those of JAX's type promotion.

By JAX's promotion a float32 divided by a length is a float64.  Then all values computed from it, such as the gradient
of a mean, are float64, too.  A loop does not compile, since its state would change its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from synkhronos.variable_types import FunctionGraph, Node, Op


def keep_dtypes(run: Callable[..., Any], node: Node) -> Callable[..., Any]:
    """Wrap the JAX function of a node so that its results have the dtypes of the node's outputs."""
    dtypes = [getattr(output.type, "dtype", None) for output in node.outputs]
    if len(dtypes) == 1:
        return lambda *inputs: _cast(run(*inputs), dtypes[0])
    return lambda *inputs: tuple(map(_cast, run(*inputs), dtypes))


def lower_graph(
    graph: FunctionGraph,
    node: Node = None,
    fgraph_name: str = "jax_funcified_fgraph",
    keeps_dtypes: bool = False,
    known_inputs: Mapping[int, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Lower a graph as PyTensor does; with ``keeps_dtypes``, the results of its nodes keep their dtypes.

    ``known_inputs`` are numbers, by position, that replace the function's inputs while it is traced.
    """
    from pytensor.link.jax.dispatch import jax_funcify, jax_typify
    from pytensor.link.utils import fgraph_to_python

    function: Callable[..., Any] = fgraph_to_python(
        graph,
        _funcify_with_dtypes if keeps_dtypes else jax_funcify,
        type_conversion_fn=jax_typify,
        fgraph_name=fgraph_name,
        **kwargs,
    )
    if known_inputs is None:
        return function
    return lambda *inputs: function(*[known_inputs.get(i, value) for i, value in enumerate(inputs)])


def _funcify_with_dtypes(op: Op, node: Node = None, **kwargs: Any) -> Any:
    from pytensor.link.jax.dispatch import jax_funcify

    run = jax_funcify(op, node=node, keeps_dtypes=True, **kwargs)
    return keep_dtypes(run, node) if node is not None and callable(run) else run


def _cast(value: Any, dtype: str | None) -> Any:
    """Cast an array to a dtype, or to the next smaller one if JAX has no float64.  Return any other value unchanged."""
    import jax

    if dtype is None or not hasattr(value, "astype") or value.dtype == dtype:
        return value
    return value.astype(jax.dtypes.canonicalize_dtype(dtype))
