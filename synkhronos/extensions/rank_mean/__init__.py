"""Mean over the rows of all ranks as a part of a graph, such as the statistics of batch normalization."""

from __future__ import annotations

from typing import Any

from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import Variable

__all__ = ["rank_mean"]


def rank_mean(values: Any, rows: Any) -> Variable:
    """Return the mean of a vector over all ranks, weighted by their numbers of rows.

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
        When ranks compute it at their own pace: under exchange rules without a common step, in the validation of a
        launcher's class and in ``synkhronos.programs``.
    ValueError
        When the function is called with ``num_slices`` above 1: a slice has other statistics than the batch.

    Notes
    -----
    It is differentiable: with a loss that is a mean over rows, values and gradients are those of one process with all
    rows.  Each mean is one exchange of a few numbers, and so is its gradient.  A rank without rows takes part.  In JAX
    mode XLA waits for the host at each mean, and the step is not fused with the all-reduce of the gradient.
    """
    library = get_library(values)
    rows = library.tensor.cast(rows, values.dtype)
    return _make_op(library.name)(values, rows)


def _make_op(library_name: str) -> Any:
    if library_name == "theano":
        from synkhronos.extensions.rank_mean.theano import TheanoRankMean

        return TheanoRankMean()
    from synkhronos.extensions.rank_mean.pytensor import PytensorRankMean

    return PytensorRankMean()
