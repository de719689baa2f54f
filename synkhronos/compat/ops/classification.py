"""Softmax and crossentropy with stable gradients.

With probabilities ``p = softmax(scores)``, the gradient is ``p * g - p * sum(p * g)``.  The crossentropy of a row is
``-log(p[class])``.  A probability that rounds to zero has no finite logarithm, and no gradient.  The gradient is
therefore built without a division by probabilities, and a rewrite computes the crossentropy from the scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor import special
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.rewriting.basic import register_stabilize
from pytensor.tensor.type import TensorType

from synkhronos.lowering.numpy_op import NumpyOp, register_lowering


class Softmax(special.Softmax):
    """PyTensor's softmax, with a gradient that cancels divisions by its probabilities."""

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the scores."""
        (probabilities,), (g,) = outputs, output_grads
        product = _multiply_and_cancel(g, probabilities)
        return [product - probabilities * product.sum(axis=self.axis, keepdims=True)]


def _multiply_and_cancel(g: Any, p: Any) -> Any:
    """Return ``g * p`` in the shape of ``p``, with divisions by ``p`` within the expression ``g`` cancelled."""
    if g.owner is not None and isinstance(g.owner.op, Elemwise):
        op, inputs = g.owner.op, g.owner.inputs
        if op == pt.true_div and (inputs[1] is p or _is_masked_quotient(inputs[0], inputs[1], p)):
            return pt.second(p, inputs[0])  # the quotient has the shape of p, its numerator may be broadcast
        if op == pt.neg:
            return -_multiply_and_cancel(inputs[0], p)
        if op == pt.add:
            return pt.add(*(_multiply_and_cancel(i, p) for i in inputs))
    return g * p


def _is_masked_quotient(numerator: Any, denominator: Any, p: Any) -> bool:
    """Whether the operands are ``switch(c, x, 0)`` and ``switch(c, p, y)``: p times their quotient is the numerator."""
    if any(v.owner is None or v.owner.op != pt.switch for v in (numerator, denominator)):
        return False
    (condition, _, zero), (other_condition, divisor, _) = numerator.owner.inputs, denominator.owner.inputs
    is_zero = pt.get_underlying_scalar_constant_value(zero, raise_not_constant=False) == 0
    return condition is other_condition and divisor is p and is_zero


class ClassCrossentropy(NumpyOp):
    """Minus the logarithm of the probability of each row's class.

    Inputs: probabilities (rows, classes) of floats, and the classes (rows,) of integers.  The output is (rows,).

    A class out of range, such as -1, raises IndexError.  XLA, which can't raise, computes NaN.

    Parameters
    ----------
    takes_log_probabilities : bool
        Whether the first input has the logarithms of probabilities.
    """

    __props__ = ("takes_log_probabilities",)

    def __init__(self, takes_log_probabilities: bool = False):
        self.takes_log_probabilities = takes_log_probabilities

    def make_node(self, p: Any, classes: Any) -> Apply:
        """Return the node of a matrix and a vector of integers."""
        p, classes = pt.as_tensor_variable(p), pt.as_tensor_variable(classes)
        if p.ndim != 2 or classes.ndim != 1:
            raise TypeError(f"crossentropy: expected a matrix and a vector, got {p.type} and {classes.type}")
        if np.dtype(classes.dtype).kind not in "iu":
            raise TypeError(f"classes: expected integers, got {classes.dtype}")
        return Apply(self, [p, classes], [TensorType(p.dtype, shape=classes.type.shape)()])

    def compute_output_shape(self, p: Any, classes: Any) -> tuple[Any, ...]:
        """Return the shape (rows,)."""
        return (p[0],)

    def check_row_counts(self, p: Any, classes: Any) -> None:
        """Raise ValueError unless there is one class for each row of probabilities."""
        if len(p) != len(classes):
            raise ValueError(f"classes: expected {len(p)}, one for each row of probabilities, got {len(classes)}")

    def compute(self, p: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Select the probability of each row's class, and compute its logarithm."""
        self.check_row_counts(p, classes)
        is_wrong = (classes < 0) | (classes >= p.shape[1])
        if is_wrong.any():
            raise IndexError(f"classes: expected 0 to {p.shape[1] - 1}, got {classes[is_wrong][0]}")
        selected = p[np.arange(len(p)), classes]
        with np.errstate(divide="ignore"):
            return -selected if self.takes_log_probabilities else -np.log(selected)

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Mark classes as disconnected."""
        return [[True], [False]]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the probabilities."""
        p, classes = inputs
        (g,) = output_grads
        is_class = pt.eq(pt.arange(p.shape[1]), classes[:, None])
        gradient = pt.switch(is_class, -g[:, None], np.zeros((), p.dtype))
        if not self.takes_log_probabilities:
            # The probabilities of other classes may be 0.
            gradient = gradient / pt.switch(is_class, p, np.ones((), p.dtype))
        return [gradient, disconnected_type()]


@register_stabilize("fast_compile")
@node_rewriter([ClassCrossentropy])
def rewrite_crossentropy_of_softmax(fgraph: Any, node: Any) -> Any:
    """Compute the crossentropy of softmax from the scores."""
    p, classes = node.inputs
    op = p.owner and p.owner.op
    if node.op.takes_log_probabilities or not isinstance(op, special.Softmax) or op.axis not in ((1,), (-1,)):
        return None
    return [ClassCrossentropy(takes_log_probabilities=True)(special.log_softmax(p.owner.inputs[0], axis=-1), classes)]


# -- XLA -----------------------------------------------------------------------------------------------------------


@register_lowering(ClassCrossentropy)
def _lower_class_crossentropy(op: ClassCrossentropy, p: Any, classes: Any) -> Any:
    import jax.numpy as jnp

    op.check_row_counts(p, classes)
    # JAX counts a negative index from the end, and casts others to int32.  A narrow dtype can't hold p.shape[1].
    indexes = classes.astype(int)
    indexes = jnp.where((indexes >= 0) & (indexes < p.shape[1]), indexes, p.shape[1])
    selected = jnp.take_along_axis(p, indexes[:, None], axis=1, mode="fill", fill_value=jnp.nan)[:, 0]
    return -selected if op.takes_log_probabilities else -jnp.log(selected)
