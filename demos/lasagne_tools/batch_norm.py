"""Batch normalization as a Lasagne layer, which Lasagne 0.1 lacks.

In training, the layer normalizes by the statistics of the batch; with ``deterministic=True``, by running averages of
these. It does not update the averages by itself: ``get_output(network, average_updates=updates)`` adds their new values
to the dict `updates`, an argument of the training function.

On several ranks, each rank normalizes by the statistics of its own rows, or with ``sync=True`` by those of all ranks'
rows, as one process does. Pass the averages' updates to `make_train_function` or `make_trainer` as ``extra_updates``,
which averages them over the ranks. In a function of your own, each rank has its own averages until
``synk.all_reduce(get_running_averages(network))``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from lasagne_tools.library import T, lasagne
from synkhronos.extensions.rank_mean import rank_mean

__all__ = ["BatchNormLayer", "get_running_averages"]


class BatchNormLayer(lasagne.layers.Layer):
    r"""Batch normalization.

    Parameters
    ----------
    incoming : Layer or tuple
        Previous layer, or shape of the input: (rows, channels, ...).
    epsilon : float
        Added to the variance, so that a constant channel does not divide by zero; above 1e-5.
    alpha : float
        Weight of a batch in the running averages, from 0 to 1.
    beta, gamma : shared variable, array, callable or None
        Initial shift and scale of each channel, as in other Lasagne layers; None for no shift or scale.
    nonlinearity : callable or None
        Applied at the end.
    sync : bool
        Whether to normalize by the statistics of all ranks' rows: see `synkhronos.extensions.rank_mean`, whose
        restrictions apply.
    **kwargs
        Arguments of the base class, such as ``name``.

    Attributes
    ----------
    beta, gamma : shared variable of shape (channels,), or None
        Shift and scale: trainable, not regularizable.
    mean, variance : shared variables of shape (channels,)
        Running averages, tagged ``running_average``.

    Notes
    -----
    .. math:: y = \gamma\, \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    Mean :math:`\mu` and variance :math:`\sigma^2` are those of rows and positions.  The variance is the biased one
    (divided by the number of values), also in the running average.

    Use it between a layer without biases and its nonlinearity: the shift replaces the biases.

    References
    ----------
    .. [1] Ioffe, S. and Szegedy, C. (2015): Batch normalization: accelerating deep network training by reducing
       internal covariate shift. ICML, arXiv:1502.03167.
    """

    def __init__(
        self,
        incoming: Any,
        epsilon: float = 1e-4,
        alpha: float = 0.1,
        beta: Any = lasagne.init.Constant(0),  # noqa: B008 - as in Lasagne: it holds nothing that changes
        gamma: Any = lasagne.init.Constant(1),  # noqa: B008
        nonlinearity: Any = None,
        sync: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(incoming, **kwargs)
        if len(self.input_shape) < 2 or self.input_shape[1] is None:
            raise ValueError(
                f"BatchNormLayer: expected an input with rows and a known number of channels, got {self.input_shape}"
            )
        # Theano asks for 1e-5, which as a float32 is less than that.
        if not epsilon > 1e-5:
            raise ValueError(f"BatchNormLayer: epsilon: expected a number above 1e-5, got {epsilon!r}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"BatchNormLayer: alpha: expected a number from 0 to 1, got {alpha!r}")
        self.epsilon, self.alpha, self.sync = epsilon, alpha, sync
        self.nonlinearity = nonlinearity or lasagne.nonlinearities.identity
        shape = (self.input_shape[1],)
        self.beta = self._add_learned_param(beta, shape, "beta")
        self.gamma = self._add_learned_param(gamma, shape, "gamma")
        self.mean = self._add_average(0, shape, "mean")
        self.variance = self._add_average(1, shape, "variance")

    def _add_learned_param(self, initial: Any, shape: tuple[int, ...], name: str) -> Any:
        return None if initial is None else self.add_param(initial, shape, name, regularizable=False)

    def _add_average(self, initial: float, shape: tuple[int, ...], name: str) -> Any:
        initializer = lasagne.init.Constant(initial)
        return self.add_param(initializer, shape, name, trainable=False, regularizable=False, running_average=True)

    def get_output_for(
        self,
        input: Any,
        deterministic: bool = False,
        average_updates: MutableMapping[Any, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the normalized input; `average_updates` gets the running averages' new values."""
        beta = T.zeros_like(self.mean) if self.beta is None else self.beta
        gamma = T.ones_like(self.mean) if self.gamma is None else self.gamma
        if deterministic:
            # Exchange rules with momentum (DiLoCo, SlowMo) may make the averaged variance negative.
            scale = gamma / T.sqrt(T.maximum(self.variance, 0) + self.epsilon)
            distance = input - self._broadcast_channels(self.mean)
            return self.nonlinearity(distance * self._broadcast_channels(scale) + self._broadcast_channels(beta))
        # One operation with its own gradient: it is bound by memory, and reads its input fewer times than the formula.
        axes = tuple(axis for axis in range(input.ndim) if axis != 1)
        if self.sync:
            normalized, mean, variance = self._normalize_by_all_ranks(input, gamma, beta, axes)
        else:
            normalized, mean, invstd = T.nnet.bn.batch_normalization_train(input, gamma, beta, axes, self.epsilon)
            variance = T.maximum(1 / T.sqr(invstd) - self.epsilon, 0)
        if average_updates is not None:
            average_updates[self.mean] = (1 - self.alpha) * self.mean + self.alpha * mean
            average_updates[self.variance] = (1 - self.alpha) * self.variance + self.alpha * variance
        return self.nonlinearity(normalized)

    def _normalize_by_all_ranks(self, input: Any, gamma: Any, beta: Any, axes: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Return the normalized input, and mean and variance of all ranks' rows, by one exchange."""
        n_channels = self.input_shape[1]
        # Relative to the running mean, which is equal on all ranks: the variance of large numbers would lose digits.
        distance = input - self._broadcast_channels(self.mean)
        moments = T.concatenate([distance.mean(axis=axes), T.sqr(distance).mean(axis=axes)])
        moments = rank_mean(moments, input.shape[0])
        shift = moments[:n_channels]
        variance = T.maximum(moments[n_channels:] - T.sqr(shift), 0)
        scale = gamma / T.sqrt(variance + self.epsilon)
        normalized = (distance - self._broadcast_channels(shift)) * self._broadcast_channels(scale)
        normalized = normalized + self._broadcast_channels(beta)
        return normalized, self.mean + shift, variance

    def _broadcast_channels(self, vector: Any) -> Any:
        """Return a vector broadcast along all axes of the input but axis 1."""
        return vector.dimshuffle("x", 0, *["x"] * (len(self.input_shape) - 2))


def get_running_averages(network: Any) -> list[Any]:
    """Return means and variances of the layers, from the first to the last; `network` has the last layer, or layers."""
    return lasagne.layers.get_all_params(network, running_average=True)
