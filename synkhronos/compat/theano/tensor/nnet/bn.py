"""The module ``theano.tensor.nnet.bn``, on PyTensor: batch normalization (Ioffe and Szegedy, arXiv:1502.03167)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from synkhronos.compat.ops.normalization import BatchNormTrain


def batch_normalization(inputs: Any, gamma: Any, beta: Any, mean: Any, std: Any, mode: str = "low_mem") -> Any:
    """Normalize by given means and standard deviations, then scale and shift."""
    if mode not in ("low_mem", "high_mem"):
        raise ValueError('mode must be either "low_mem", "high_mem"')
    return (inputs - mean) * (gamma / std) + beta


def _resolve_axes(axes: Any, ndim: int) -> tuple[int, ...]:
    if axes == "per-activation":
        return (0,)
    if axes == "spatial":
        return (0, *range(2, ndim))
    result = tuple(sorted(int(a) for a in (axes if isinstance(axes, tuple | list | np.ndarray) else (axes,))))
    if not result:
        raise ValueError("there should be at least one normalization axis")
    if min(result) < 0 or max(result) >= ndim:
        raise ValueError(f"axes should be less than ndim (<{ndim}), but {axes} given")
    return result


class _ParameterLayout:
    """Layout of all parameters, that of ``gamma``: all dimensions, or only those that are not normalized."""

    def __init__(self, inputs: Any, axes: tuple[int, ...], gamma: Any):
        self.axes = axes
        self.remaining_axes = [a for a in range(inputs.ndim) if a not in axes]
        self.ndim = inputs.ndim
        self.is_full = gamma.ndim == inputs.ndim
        self.pattern = [self.remaining_axes.index(a) if a in self.remaining_axes else "x" for a in range(inputs.ndim)]

    def expand(self, name: str, parameter: Any) -> Any:
        """Return a parameter that broadcasts against the inputs."""
        ndim = self.ndim if self.is_full else len(self.remaining_axes)
        parameter = pt.as_tensor_variable(parameter)
        if parameter.ndim != ndim:
            raise ValueError(
                f"{name}: expected {ndim} dimensions, as gamma, got {parameter.ndim}: parameters have those "
                "of the inputs, or those that are not normalized"
            )
        return pt.specify_broadcastable(parameter, *self.axes) if self.is_full else parameter.dimshuffle(*self.pattern)

    def squeeze(self, statistic: Any) -> Any:
        """Return a statistic in the parameters' layout."""
        return statistic if self.is_full else statistic.dimshuffle(*self.remaining_axes)


def _as_epsilon(value: float, dtype: str) -> Any:
    """Return epsilon as an array of a dtype.  Raise ValueError if it is too small."""
    rounded = np.asarray(value, pytensor.config.floatX)
    if rounded < 1e-5:
        raise ValueError(f"epsilon must be at least 1e-5, got {rounded}")
    return np.asarray(value, dtype)


def batch_normalization_train(
    inputs: Any,
    gamma: Any,
    beta: Any,
    axes: str | Sequence[int] = "per-activation",
    epsilon: float = 1e-4,
    running_average_factor: float = 0.1,
    running_mean: Any = None,
    running_var: Any = None,
) -> tuple[Any, ...]:
    """Normalize by the mean and variance of the inputs, then scale and shift.

    Return the output, the mean and the reciprocal of the standard deviation; with running averages, also their new
    values.  ``gamma`` and ``beta`` have as many dimensions as the inputs, of length 1 on ``axes``, or lack ``axes``.
    ``axes`` is 'per-activation' for the first axis, 'spatial' for all axes but the second, or a tuple.

    Examples
    --------
    >>> x = np.array([[0.0], [2.0]])
    >>> out, mean, invstd = T.nnet.bn.batch_normalization_train(x, np.ones(1), np.zeros(1))
    >>> mean.eval()
    array([1.])
    """
    inputs, gamma = pt.as_tensor_variable(inputs), pt.as_tensor_variable(gamma)
    layout = _ParameterLayout(inputs, _resolve_axes(axes, inputs.ndim), gamma)
    scale, shift = layout.expand("gamma", gamma), layout.expand("beta", beta)
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean, running_var: expected both or neither")
    output, mean, invstd = BatchNormTrain(layout.axes, _as_epsilon(epsilon, "float64"))(inputs, scale, shift)
    results = [mean, invstd]
    if running_mean is not None:
        # The rounding error of this difference is small compared with var + epsilon, the sum in which it is used.
        var = pt.maximum(1 / invstd**2 - _as_epsilon(epsilon, invstd.dtype), 0)
        factor = pt.cast(running_average_factor, output.dtype)  # the averages keep their dtype
        count = pt.cast(pt.prod([inputs.shape[a] for a in layout.axes]), inputs.dtype)
        old_mean, old_var = (
            layout.expand("running_mean", running_mean),
            layout.expand("running_var", running_var),
        )
        results.append(old_mean * (1.0 - factor) + mean * factor)
        results.append(old_var * (1.0 - factor) + (count / (count - 1)) * var * factor)
    return (output, *(layout.squeeze(result) for result in results))


def batch_normalization_test(
    inputs: Any,
    gamma: Any,
    beta: Any,
    mean: Any,
    var: Any,
    axes: str | Sequence[int] = "per-activation",
    epsilon: float = 1e-4,
) -> Any:
    """Normalize by given means and variances, then scale and shift; parameters as in `batch_normalization_train`."""
    inputs, gamma = pt.as_tensor_variable(inputs), pt.as_tensor_variable(gamma)
    layout = _ParameterLayout(inputs, _resolve_axes(axes, inputs.ndim), gamma)
    scale, shift = layout.expand("gamma", gamma), layout.expand("beta", beta)
    mean, var = layout.expand("mean", mean), layout.expand("var", var)
    return (inputs - mean) * (scale / pt.sqrt(var + _as_epsilon(epsilon, inputs.dtype))) + shift
