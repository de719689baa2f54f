"""Attention of transformers, by cuDNN's fused kernel where JAX mode can use it.

For each head, attention is ``softmax(query @ key.T * scale) @ value`` (arXiv:1706.03762).

PyTensor differentiates a graph before it is compiled.  The gradient of products and softmax reads the matrix of
attention weights, which a fused kernel does not store.  Therefore attention is one Op, and its gradient another.  In
all modes but JAX mode, and for float64, a rewrite decomposes both into products and softmax.

.. code-block:: text

   dot_product_attention ──▶ Attention ─── other modes ──▶ products, softmax
          │ gradient             └── JAX mode ──▶ jax.nn.dot_product_attention ──▶ cuDNN, or products and softmax
          ▼
   AttentionGradient: the same two ways; XLA merges its forward pass with that of Attention
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import in2out, node_rewriter

from synkhronos.lowering.linker import DECOMPOSE_ATTENTION
from synkhronos.lowering.numpy_op import register_lowering
from synkhronos.variable_types import Array, FunctionGraph, Node, Variable

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: Variable,
    key: Variable,
    value: Variable,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Variable:
    """Return ``softmax(query @ key.T * scale) @ value`` for each head.

    Parameters
    ----------
    query : variable of shape (batch, length, heads, width)
        Of float16, float32 or float64.
    key, value : variables of shape (batch, key length, heads, width)
        Of the dtype of `query`.
    mask : variable of bool, optional
        True where a query may attend to a key.  Of at most four dimensions that broadcast to (batch, heads, length, key
        length); PyTensor has to know which of its lengths are 1.
    scale : float, optional
        Factor of the products; ``1 / sqrt(width)`` by default.
    is_causal : bool
        Whether query i may attend to the keys 0 to i only.

    Returns
    -------
    variable of shape (batch, length, heads, width)
        For a query without a key that it may attend to: the mean of all values.

    Raises
    ------
    TypeError
        If dtypes differ or are not floats, or if `mask` is not boolean.
    ValueError
        If an argument has another number of dimensions, or lengths that are known not to match.

    Notes
    -----
    On GPUs of compute capability 8.0 or higher, JAX mode calls cuDNN's fused kernel on three conditions.  The factors
    are float16, or float32 in products of bfloat16 (``JAX_DEFAULT_MATMUL_PRECISION=bfloat16``).  `width` is a multiple
    of 8 up to 128.  With a mask, both lengths are even.  The kernel stores no matrix of (length, key length).  All else
    is computed as written above, in float32 or float64.

    Examples
    --------
    >>> import numpy as np, pytensor.tensor as pt
    >>> x = pt.tensor4("x")
    >>> dot_product_attention(x, x, x, is_causal=True).eval({x: np.ones((1, 3, 1, 2))}).shape
    (1, 3, 1, 2)
    """
    names = "query", "key", "value"
    tensors = [pt.as_tensor_variable(tensor) for tensor in (query, key, value)]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in ("float16", "float32", "float64") or tensor.dtype != tensors[0].dtype:
            raise TypeError(f"{name}: expected {names[0]}'s dtype, a float, got {tensor.dtype}")
        if tensor.ndim != 4:
            raise ValueError(f"{name}: expected (batch, length, heads, width), got {tensor.ndim} dimensions")
        for axis, length in enumerate(tensor.type.shape):
            expected_length = tensors[1 if name == "value" else 0].type.shape[axis]
            if None not in (length, expected_length) and length != expected_length and (axis != 1 or name == "value"):
                raise ValueError(f"{name}: expected a length of {expected_length} at axis {axis}, got {length}")
    if mask is not None:
        mask = pt.as_tensor_variable(mask)
        if mask.dtype != "bool":
            raise TypeError(f"mask: expected bool, got {mask.dtype}")
        if mask.ndim > 4:
            raise ValueError(f"mask: expected at most 4 dimensions, got {mask.ndim}")
        tensors.append(pt.shape_padleft(mask, 4 - mask.ndim))
    if scale is not None and not np.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return Attention(None if scale is None else float(scale), bool(is_causal))(*tensors)


# -- Ops ---------------------------------------------------------------------------------------------------------------


class _AttentionOp(Op):
    """Base class of `Attention` and `AttentionGradient`; a ``scale`` of None stands for ``1 / sqrt(width)``."""

    __props__ = ("scale", "is_causal")
    #: Inputs are rounded for products in bfloat16; see `synkhronos.lowering.precision`.
    is_product = True

    def __init__(self, scale: float | None, is_causal: bool):
        self.scale, self.is_causal = scale, is_causal

    def decompose(self, *inputs: Any) -> list[Variable]:
        """Return the outputs, computed by products and softmax."""
        raise NotImplementedError

    def perform(self, node: Node, inputs: Sequence[Array], output_storage: list[list[Any]], params: Any = None) -> None:
        """Compute by the decomposition, in modes without rewrites and for constants."""
        copies = [variable.type() for variable in node.inputs]
        outputs = pytensor.function(copies, self.decompose(*copies), on_unused_input="ignore")(*inputs)
        for storage, output in zip(output_storage, outputs, strict=True):
            storage[0] = output

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """Return the gradients of the decomposition."""
        copies = [variable.copy() for variable in inputs]  # one variable may be two inputs
        differentiable = [copy for copy in copies if copy.dtype != "bool"]
        pairs = zip(self.decompose(*copies), cotangents, strict=True)
        known_grads = {output: cotangent for output, cotangent in pairs if hasattr(cotangent.type, "dtype")}
        gradients = iter(pytensor.grad(None, differentiable, known_grads=known_grads))
        # PyTensor's gradient of a cast from float16 has another dtype.
        return [disconnected_type() if copy.dtype == "bool" else next(gradients).astype(copy.dtype) for copy in copies]

    def L_op(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], output_grads: Sequence[Variable]
    ) -> list[Variable]:  # noqa: N802 - PyTensor's name
        """Return the gradients: PyTensor before 3.0 calls this method, newer versions `pullback`."""
        return self.pullback(inputs, outputs, output_grads)

    def connection_pattern(self, node: Node) -> list[list[bool]]:
        """Return the inputs with a derivative: all but the mask."""
        return [[variable.dtype != "bool"] * len(node.outputs) for variable in node.inputs]


class Attention(_AttentionOp):
    """Scaled dot-product attention.  Inputs: query, key, value and optionally a mask.

    The query, and the output, have the shape (batch, length, heads, width), the key and the value (batch, key length,
    heads, width).  The mask is of bool and broadcasts to (batch, heads, length, key length); True where attended.
    """

    def make_node(self, *inputs: Any) -> Apply:
        """Return a node for these inputs."""
        return Apply(self, list(inputs), [inputs[0].type()])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shape of the query."""
        return [arguments[-1][0]]

    def decompose(self, query: Variable, key: Variable, value: Variable, *masks: Variable) -> list[Variable]:
        """Return the output, computed by products and softmax."""
        dtype = "float64" if query.dtype == "float64" else "float32"
        # (batch, heads, length, width)
        q, k, v = (tensor.astype(dtype).transpose(0, 2, 1, 3) for tensor in (query, key, value))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = q @ k.swapaxes(-1, -2) * pt.cast(scale, dtype)  # (batch, heads, length, key length)
        if self.is_causal:
            masks = (*masks, pt.arange(scores.shape[3]) <= pt.arange(scores.shape[2])[:, None])
        # A finite number, the same as JAX's: with -inf the softmax of a row without an attended key would be NaN.
        for mask in masks:
            scores = pt.switch(mask, scores, np.asarray(-0.7 * np.finfo("float32").max, dtype))
        attended = pt.special.softmax(scores, axis=-1) @ v
        return [attended.transpose(0, 2, 1, 3).astype(query.dtype)]

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """Return the gradients: outputs of `AttentionGradient`."""
        gradients = AttentionGradient(self.scale, self.is_causal)(*inputs, *cotangents)
        return [*gradients, *[disconnected_type() for _ in inputs[3:]]]


class AttentionGradient(_AttentionOp):
    """Gradient of `Attention` with respect to query, key and value.

    Inputs: the inputs of `Attention`, and the gradient with respect to its output.
    """

    def make_node(self, *inputs: Any) -> Apply:
        """Return a node for these inputs."""
        return Apply(self, list(inputs), [variable.type() for variable in inputs[:3]])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shapes of query, key and value."""
        return list(arguments[-1][:3])

    def decompose(self, *inputs: Any) -> list[Variable]:
        """Return the gradients of the decomposition of attention."""
        forward = Attention(self.scale, self.is_causal)
        return _AttentionOp.pullback(forward, inputs[:-1], [], inputs[-1:])[:3]


@node_rewriter([_AttentionOp])
def _rewrite_attention(fgraph: FunctionGraph, node: Node) -> list[Variable]:
    """Decompose attention into products and softmax."""
    return node.op.decompose(*node.inputs)


@node_rewriter([_AttentionOp])
def _rewrite_float64_attention(fgraph: FunctionGraph, node: Node) -> list[Any] | bool:
    """Decompose attention in float64, whose softmax JAX would compute in float32."""
    return node.op.decompose(*node.inputs) if node.inputs[0].dtype == "float64" else False


# Before shapes are inferred and the graph is canonicalized, at 0.1 and 1.
optdb.register(
    DECOMPOSE_ATTENTION, in2out(_rewrite_attention, name=DECOMPOSE_ATTENTION), "fast_run", "fast_compile", position=0.02
)
optdb.register(
    "decompose_attention_float64",
    in2out(_rewrite_float64_attention, name="decompose_attention_float64"),
    "jax",
    position=0.02,
)


# -- JAX ---------------------------------------------------------------------------------------------------------------


@register_lowering(Attention)
def _lower_attention(op: Attention, *inputs: Any) -> Any:
    return _compute_attention_vjp(op, *inputs)[0]


@register_lowering(AttentionGradient)
def _lower_attention_gradient(op: AttentionGradient, *inputs: Any) -> Any:
    attended, pull_back = _compute_attention_vjp(op, *inputs[:-1])
    return pull_back(inputs[-1].astype(attended.dtype))


def _compute_attention_vjp(op: Op, query: Array, key: Array, value: Array, *masks: Any) -> Any:
    """Return attention and the function that computes its gradients from a cotangent, as ``jax.vjp`` does.

    The arguments are JAX arrays with the shapes of the inputs of `Attention`; the first three have one float dtype.
    Both Ops call this function, so that their forward passes are equal and XLA computes only one.
    """
    import jax
    import jax.numpy as jnp

    lengths = query.shape[1], key.shape[1]
    options: dict[str, Any] = {"scale": op.scale, "is_causal": op.is_causal}
    if masks:
        mask = jnp.broadcast_to(masks[0], (*masks[0].shape[:2], *lengths))
        # cuDNN's causal masking fills scores with another value than its mask does, so both are combined into one mask.
        options |= {"mask": mask & jnp.tril(jnp.ones(lengths, bool)) if op.is_causal else mask, "is_causal": False}
    capability = getattr(jax.local_devices()[0], "compute_capability", None)  # CPUs have none
    if _is_cudnn_supported(query, lengths, bool(masks), capability):
        options["implementation"] = "cudnn"
    # On a CPU, XLA does not support the products of float16 that JAX requests.
    dtype = query.dtype if capability else jnp.promote_types(query.dtype, jnp.float32)

    def attend(*tensors: Any) -> Any:
        return jax.nn.dot_product_attention(*[x.astype(dtype) for x in tensors], **options).astype(query.dtype)

    return jax.vjp(attend, query, key, value)


def _is_cudnn_supported(query: Array, lengths: tuple[int, int], has_mask: bool, capability: str | None) -> bool:
    """Whether cuDNN's fused kernel supports these inputs on a device of this compute capability."""
    width = query.shape[3]
    if query.dtype.itemsize != 2 or width % 8 or width > 128 or (has_mask and any(n % 2 for n in lengths)):
        return False
    return float(capability or 0) >= 8
