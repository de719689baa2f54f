"""The module ``theano.tensor.nnet.nnet``, on PyTensor: nonlinearities and losses."""

from typing import Any

import pytensor.tensor as pt
from pytensor.tensor import sigmoid, softplus, special

from synkhronos.compat.ops.classification import ClassCrossentropy as CrossentropyCategorical1Hot
from synkhronos.compat.ops.classification import Softmax
from synkhronos.compat.ops.rectifier import rectifier

# -- nonlinearities --------------------------------------------------------------------------------------------------


def _as_matrix(c: Any) -> Any:
    c = pt.as_tensor_variable(c)
    return c.dimshuffle("x", 0) if c.ndim == 1 else c


def softmax(c: Any) -> Any:
    """Return softmax of each row; a vector becomes a matrix of one row."""
    x = _as_matrix(c)
    return Softmax(axis=(x.ndim - 1,))(x)


softmax_graph = softmax


def logsoftmax(c: Any) -> Any:
    """Return the logarithm of softmax of each row."""
    return special.log_softmax(_as_matrix(c), axis=-1)


def softmax_with_bias(x: Any, b: Any) -> Any:
    """Return softmax of each row plus a vector."""
    return softmax(x + b)


def relu(x: Any, alpha: Any = 0) -> Any:
    """Return ``x``, and ``alpha * x`` where it is negative."""
    x = pt.as_tensor_variable(x)
    if isinstance(alpha, int | float) and alpha == 0:
        return rectifier(x) if x.dtype.startswith("float") else 0.5 * (x + pt.abs(x))
    alpha = pt.as_tensor_variable(alpha)
    return 0.5 * (1 + alpha) * x + 0.5 * (1 - alpha) * pt.abs(x)


def elu(x: Any, alpha: Any = 1) -> Any:
    """Return the exponential linear unit (Clevert et al., arXiv:1511.07289)."""
    return pt.switch(x > 0, x, alpha * pt.expm1(x))


def selu(x: Any) -> Any:
    """Return the scaled exponential linear unit (Klambauer et al., arXiv:1706.02515)."""
    return 1.0507009873554804934193349852946 * elu(x, 1.6732632423543772848170429916717)


def softsign(x: Any) -> Any:
    """Return ``x / (1 + abs(x))``."""
    x = pt.as_tensor_variable(x)
    return x / (1.0 + pt.abs(x))


# -- losses ----------------------------------------------------------------------------------------------------------


def binary_crossentropy(output: Any, target: Any) -> Any:
    """Return the elementwise crossentropy of probabilities; numerically stable if ``output`` is a sigmoid."""
    return -(target * pt.log(output) + (1.0 - target) * pt.log(1.0 - output))


def sigmoid_binary_crossentropy(output: Any, target: Any) -> Any:
    """Return the elementwise crossentropy of ``sigmoid(output)``."""
    return target * softplus(-output) + (1 - target) * softplus(output)


def categorical_crossentropy(coding_dist: Any, true_dist: Any) -> Any:
    """Return the crossentropy of each row.  ``true_dist`` has probabilities, or integers: classes."""
    coding_dist, true_dist = pt.as_tensor_variable(coding_dist), pt.as_tensor_variable(true_dist)
    if true_dist.ndim == coding_dist.ndim:
        return -pt.sum(true_dist * pt.log(coding_dist), axis=coding_dist.ndim - 1)
    if true_dist.ndim == coding_dist.ndim - 1:
        return crossentropy_categorical_1hot(coding_dist, true_dist)
    n = coding_dist.ndim
    raise TypeError(f"true_dist: expected {n} or {n - 1} dimensions, got {true_dist.ndim}")


#: Minus the logarithm of the probability of each row's class.
crossentropy_categorical_1hot = CrossentropyCategorical1Hot()


def crossentropy_softmax_1hot(x: Any, y_idx: Any, **kwargs: Any) -> Any:
    """Return the crossentropy of softmax and the probabilities."""
    p = softmax(x)
    return crossentropy_categorical_1hot(p, y_idx), p


def crossentropy_softmax_1hot_with_bias(x: Any, b: Any, y_idx: Any, **kwargs: Any) -> Any:
    """Return the crossentropy of softmax of ``x + b``, and the probabilities."""
    return crossentropy_softmax_1hot(x + b, y_idx)


def crossentropy_softmax_argmax_1hot_with_bias(x: Any, b: Any, y_idx: Any, **kwargs: Any) -> Any:
    """Return the crossentropy of softmax of ``x + b``, the probabilities, and the most probable class."""
    losses, p = crossentropy_softmax_1hot(x + b, y_idx)
    return losses, p, pt.argmax(p, axis=1).astype(y_idx.dtype)


def confusion_matrix(actual: Any, pred: Any) -> list[Any]:
    """Return the counts of predictions, a row per actual and a column per predicted class, and the sorted classes."""
    if actual.ndim != 1 or pred.ndim != 1:
        raise ValueError("actual and pred must be 1-d tensor variables")
    order = pt.unique(pt.concatenate([actual, pred]))
    rows = pt.eq(actual[:, None], order).astype("int64")
    columns = pt.eq(pred[:, None], order).astype("int64")
    return [pt.dot(rows.T, columns), order]


def h_softmax(
    x: Any,
    batch_size: Any,
    n_outputs: int,
    n_classes: int,
    n_outputs_per_class: int,
    W1: Any,  # noqa: N803 - Theano's name
    b1: Any,
    W2: Any,  # noqa: N803
    b2: Any,
    target: Any = None,
) -> Any:
    """Return hierarchical softmax in two levels (Goodman, arXiv:cs/0108006): all probabilities, or the targets'.

    ``x`` is (batch_size, features).  ``W1`` (features, n_classes) and ``b1`` are the weights of the classes, ``W2``
    (n_classes, features, n_outputs_per_class) and ``b2`` the weights of the outputs of each class.
    """
    class_probabilities = softmax(pt.dot(x, W1) + b1)
    if target is None:
        scores = pt.tensordot(x, W2, [[1], [1]]) + b2
        within_class = softmax(scores.reshape((-1, n_outputs_per_class))).reshape((batch_size, n_classes, -1))
        return (class_probabilities[:, :, None] * within_class).reshape((batch_size, -1))[:, :n_outputs]
    target = target.flatten()
    target_class, target_output = target // n_outputs_per_class, target % n_outputs_per_class
    scores = pt.matmul(x[:, None, :], W2[target_class])[:, 0] + b2[target_class]
    rows = pt.arange(batch_size)
    return class_probabilities[rows, target_class] * softmax(scores)[rows, target_output]
