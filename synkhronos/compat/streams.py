"""Random numbers by Theano's names, from NumPy's generators.

`RandomStreams`
    What ``theano.tensor.shared_randomstreams.RandomStreams`` and ``theano.sandbox.rng_mrg.MRG_RandomStreams`` are on
    PyTensor.

The numbers are other ones than Theano's for the same seed.  Each variable draws from a shared generator of its own,
which functions move on as they draw (and which Synkhronos moves apart by rank).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.traversal import apply_ancestors

__all__ = ["RandomStreams"]


class RandomStreams:
    """A source of random variables.

    Parameters
    ----------
    seed : int or sequence of int, optional
        As ``numpy.random.SeedSequence`` takes it; another each time when it is left out.
    use_cuda : bool, optional
        Without a meaning here.

    Examples
    --------
    >>> random = RandomStreams(seed=1)
    >>> draw = pytensor.function([], random.uniform(size=(2, 3)))
    >>> draw().shape
    (2, 3)
    """

    def __init__(self, seed: Any = None, use_cuda: bool | None = None):
        self.default_instance_seed = seed
        #: The shared generators, each with the variable of its next state.
        self.state_updates: list[tuple[Any, Any]] = []
        self._sequence = np.random.SeedSequence(seed)

    def updates(self) -> list[tuple[Any, Any]]:
        """Return pairs of a shared generator and its next state; functions apply them by themselves."""
        return list(self.state_updates)

    def seed(self, seed: Any = None) -> None:
        """Start all streams anew.

        Parameters
        ----------
        seed : int or sequence of int, optional
            The seed that was given at first, if it is left out.
        """
        self._sequence = np.random.SeedSequence(self.default_instance_seed if seed is None else seed)
        for (generator, _), child in zip(
            self.state_updates, self._sequence.spawn(len(self.state_updates)), strict=True
        ):
            generator.set_value(np.random.default_rng(child), borrow=True)

    def _draw(self, draw: Callable[..., Any], *parameters: Any, then: Callable[[Any], Any], **kwargs: Any) -> Any:
        """Return a random variable with a generator of its own: what ``then`` makes of PyTensor's."""
        (child,) = self._sequence.spawn(1)
        generator = pytensor.shared(np.random.default_rng(child), borrow=True)
        with warnings.catch_warnings():
            # Newer PyTensor asks callers to say whether they want the next state too; older has no such argument
            # everywhere.
            warnings.filterwarnings("ignore", "RandomVariable Ops will stop hiding", DeprecationWarning)
            drawn = draw(*parameters, rng=generator, **kwargs)
        # Some draws are further expressions of what the generator's own node draws.
        (following,) = (node.outputs[0] for node in apply_ancestors([drawn]) if generator in node.inputs)
        with warnings.catch_warnings():
            # PyTensor's own streams set it too; a function finds its updates there.
            warnings.filterwarnings("ignore", "Setting default_update", DeprecationWarning)
            generator.default_update = following
        self.state_updates.append((generator, following))
        result = then(drawn)
        # Programs seed one variable, or copy its state, by these.
        result.rng, result.update = generator, (generator, following)
        return result

    def _keys(self, size: Any, then: Callable[[Any], Any]) -> Any:
        """Return what ``then`` makes of numbers between 0 and 1."""
        return self._draw(pt.random.uniform, 0.0, 1.0, size=_size(size), dtype=pytensor.config.floatX, then=then)

    # -- continuous --------------------------------------------------------------------------------------------------

    def uniform(
        self,
        size: Any = None,
        low: Any = 0.0,
        high: Any = 1.0,
        ndim: Any = None,
        dtype: Any = None,
        nstreams: Any = None,
    ) -> Any:
        """Draw from the interval between ``low`` and ``high``, of dtype floatX by default."""
        dtype = dtype or pytensor.config.floatX
        return self._draw(pt.random.uniform, low, high, size=_size(size), dtype=dtype, then=_same)

    def normal(
        self,
        size: Any = None,
        avg: Any = 0.0,
        std: Any = 1.0,
        ndim: Any = None,
        dtype: Any = None,
        nstreams: Any = None,
        truncate: bool = False,
    ) -> Any:
        """Draw from the normal distribution of a mean and a standard deviation.

        With ``truncate`` no further than two of these from the mean.
        """
        if truncate:
            return self.truncated_normal(size, avg, std, dtype=dtype)
        dtype = dtype or pytensor.config.floatX
        return self._draw(pt.random.normal, avg, std, size=_size(size), dtype=dtype, then=_same)

    def truncated_normal(
        self,
        size: Any = None,
        avg: Any = 0.0,
        std: Any = 1.0,
        ndim: Any = None,
        dtype: Any = None,
        nstreams: Any = None,
    ) -> Any:
        """Draw from the normal distribution, no further than two standard deviations from the mean."""
        low, high = 0.022750131948179212, 0.9772498680518208  # the normal distribution's values at -2 and 2
        dtype = dtype or pytensor.config.floatX

        def stretched(position: Any) -> Any:
            return (avg + std * np.sqrt(2.0) * pt.erfinv(2 * position - 1)).astype(dtype)

        return self._draw(pt.random.uniform, low, high, size=_size(size), dtype=dtype, then=stretched)

    # -- discrete ----------------------------------------------------------------------------------------------------

    def binomial(
        self, size: Any = None, n: Any = 1, p: Any = 0.5, ndim: Any = None, dtype: Any = "int64", nstreams: Any = None
    ) -> Any:
        """Draw how many of ``n`` trials succeed, each with probability ``p``."""
        if isinstance(n, int | np.integer) and n == 1:
            # A comparison is much cheaper than the general algorithm; dropout draws so.
            p = pt.as_tensor_variable(p)
            return self._keys(p.shape if size is None else size, lambda keys: pt.lt(keys, p).astype(dtype))
        return self._draw(pt.random.binomial, n, p, size=_size(size), then=_as(dtype))

    def random_integers(
        self, size: Any = None, low: Any = 0, high: Any = 1, ndim: Any = None, dtype: Any = "int64"
    ) -> Any:
        """Draw integers from ``low`` to ``high``, both included."""
        return self._draw(pt.random.integers, low, high + 1, size=_size(size), then=_as(dtype))

    def poisson(self, size: Any = None, lam: Any = 1.0, ndim: Any = None, dtype: Any = "int64") -> Any:
        """Draw from the Poisson distribution of a mean."""
        return self._draw(pt.random.poisson, lam, size=_size(size), then=_as(dtype))

    def choice(
        self,
        size: Any = None,
        a: Any = 2,
        replace: bool = True,
        p: Any = None,
        ndim: Any = None,
        dtype: Any = "int64",
        nstreams: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Draw from ``0 ... a - 1``, or from the elements of an array, with probabilities."""
        then = _same if dtype is None else _as(dtype)
        return self._draw(pt.random.choice, a, size=_size(size), replace=replace, p=p, then=then)

    def multinomial(
        self,
        size: Any = None,
        n: Any = 1,
        pvals: Any = (0.5, 0.5),
        ndim: Any = None,
        dtype: Any = "int64",
        **kwargs: Any,
    ) -> Any:
        """Draw how often each outcome comes up in ``n`` trials; one row of probabilities for each draw."""
        return self._draw(pt.random.multinomial, n, pvals, size=_size(size), then=_as(dtype))

    def permutation(self, size: Any = None, n: Any = 1, ndim: Any = None, dtype: Any = "int64") -> Any:
        """Draw a permutation of ``0 ... n - 1``, or as many as an array of a size has elements."""
        if size is None:
            return self._draw(pt.random.permutation, n, then=_as(dtype))
        return self._keys((*_size(size), n), lambda keys: pt.argsort(keys, axis=-1).astype(dtype))

    def shuffle_row_elements(self, input: Any) -> Any:
        """Shuffle the elements of each row of a matrix in a way of its own."""
        return self._keys(input.shape, lambda keys: pt.take_along_axis(input, pt.argsort(keys, axis=-1), axis=-1))


def _same(drawn: Any) -> Any:
    return drawn


def _as(dtype: Any) -> Callable[[Any], Any]:
    """Return a function that casts."""
    return lambda drawn: drawn.astype(dtype)


def _size(size: Any) -> Any:
    """Return a size as PyTensor takes it: a tuple, a shape, or None."""
    if isinstance(size, int | np.integer):
        return (int(size),)
    return tuple(size) if isinstance(size, list | tuple) else size
