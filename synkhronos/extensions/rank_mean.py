"""Mean over the rows of all ranks as a part of a graph, such as the statistics of batch normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.engines.rank_mean import MARK, average_over_ranks
from synkhronos.graphs import library_of

__all__ = ["rank_mean"]


class _RankMean:
    """Op: the mean of a vector over the ranks, weighted by their numbers of rows.

    Each rank's loss is a mean over its rows, and the loss of all ranks their mean by rows.  So the gradient is the same
    mean, of the ranks' gradients.
    """

    __props__ = ()

    def make_node(self, values: Any, rows: Any) -> Any:
        """Return the node of a vector and a scalar."""
        return self.apply_class(self, [values, rows], [values.type()])  # type: ignore[attr-defined]

    def perform(self, node: Any, inputs: Any, outputs: Any, params: Any = None) -> None:
        """Average over the ranks."""
        outputs[0][0] = np.array(average_over_ranks(*inputs))

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shape of the vector."""
        return [arguments[-1][0]]

    def do_constant_folding(self, *_: Any) -> bool:
        """Return False: the compilation of one rank would wait for the others."""
        return False

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Return that the mean is differentiated with respect to the vector only."""
        return [[True], [False]]

    def _differentiate(self, inputs: Any, gradients: Any) -> list[Any]:
        disconnected = self.disconnected_type()  # type: ignore[attr-defined]
        return [self(gradients[0], inputs[1]), disconnected()]  # type: ignore[operator]

    def grad(self, inputs: Any, gradients: Any) -> list[Any]:
        """Return the gradients with respect to the inputs (Theano)."""
        return self._differentiate(inputs, gradients)

    def pullback(self, inputs: Any, outputs: Any, gradients: Any) -> list[Any]:
        """Return the gradients with respect to the inputs (PyTensor)."""
        return self._differentiate(inputs, gradients)


setattr(_RankMean, MARK, True)


def rank_mean(values: Any, rows: Any) -> Any:
    """Return the mean of a vector over all ranks, by their numbers of rows.

    Parameters
    ----------
    values : vector variable of floats
        A mean over the rows of a rank, such as ``x.mean(axis=0)``.
    rows : scalar variable
        Number of this rank's rows, ``x.shape[0]``.

    Returns
    -------
    vector variable
        Of the type of `values`.  In a function of one process, such as the library's own, it is `values`.

    Raises
    ------
    RuntimeError
        When ranks compute it at their own pace: under exchange rules without a common step, in the launcher and in
        `synkhronos.tasks`.
    ValueError
        When the function is called with ``num_slices`` above 1: a slice has other statistics than the batch.

    Notes
    -----
    It is differentiable: with a loss that is a mean over rows, values and gradients are those of one process with all
    rows.  Each mean is one exchange of a few numbers, and so is its gradient.  A rank without rows takes part.  In JAX
    mode XLA waits for the host at each mean, and the step is not fused with the all-reduce of the gradient.
    """
    library = library_of(values)
    rows = library.tensor.cast(rows, values.dtype)
    return _get_op(library.name)(values, rows)


def _get_op(name: str) -> Any:
    if name == "theano":
        from synkhronos.extensions.rank_mean_theano import RankMean
    else:
        from synkhronos.extensions.rank_mean_pytensor import RankMean
    return RankMean()
