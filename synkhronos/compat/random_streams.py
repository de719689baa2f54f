"""Theano's random streams on NumPy's generators.

The numbers differ from Theano's for the same seed.  Each variable draws from its own shared generator, which
functions update as they draw.  On each rank Synkhronos advances the generator to another part of its stream.
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
    """A source of random variables: Theano's ``RandomStreams`` and ``MRG_RandomStreams``.

    The methods have Theano's arguments.  They ignore ``nstreams``, and ``ndim``: PyTensor infers the number of axes.

    Parameters
    ----------
    seed : int or sequence of int, optional
        Entropy for ``numpy.random.SeedSequence``; a random one by default.
    use_cuda : bool, optional
        Ignored.

    Examples
    --------
    >>> random = RandomStreams(seed=1)
    >>> draw = pytensor.function([], random.uniform(size=(2, 3)))
    >>> draw().shape
    (2, 3)
    """

    def __init__(self, seed: Any = None, use_cuda: bool | None = None):
        self.default_instance_seed = seed
        #: Pairs of a shared generator and the variable of its next state.
        self.state_updates: list[tuple[Any, Any]] = []
        self._sequence = np.random.SeedSequence(seed)

    def updates(self) -> list[tuple[Any, Any]]:
        """Return pairs of a shared generator and its next state, which functions apply as default updates."""
        return list(self.state_updates)

    def seed(self, seed: Any = None) -> None:
        """Restart all streams from a seed, by default the seed of the constructor."""
        self._sequence = np.random.SeedSequence(self.default_instance_seed if seed is None else seed)
        for (generator, _), seed_sequence in zip(
            self.state_updates, self._sequence.spawn(len(self.state_updates)), strict=True
        ):
            generator.set_value(np.random.default_rng(seed_sequence), borrow=True)

    def _draw(
        self,
        distribution: Callable[..., Any],
        *parameters: Any,
        transform: Callable[[Any], Any] | None = None,
        cast_to: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return a random variable of PyTensor, transformed and cast, and record its own generator."""
        if "size" in kwargs:
            kwargs["size"] = _to_size(kwargs["size"])
        (seed_sequence,) = self._sequence.spawn(1)
        generator = pytensor.shared(np.random.default_rng(seed_sequence), borrow=True)
        with warnings.catch_warnings():
            # Newer PyTensor requires an argument that older versions lack: whether to return the next state.
            warnings.filterwarnings("ignore", "RandomVariable Ops will stop hiding", DeprecationWarning)
            # PyTensor's own streams set it too: functions read their updates from it.
            warnings.filterwarnings("ignore", "Setting default_update", DeprecationWarning)
            variable = distribution(*parameters, rng=generator, **kwargs)
            # The result of some draws is an expression above the node that uses the generator.
            (next_state,) = (node.outputs[0] for node in apply_ancestors([variable]) if generator in node.inputs)
            generator.default_update = next_state
        self.state_updates.append((generator, next_state))
        result = variable if transform is None else transform(variable)
        result = result if cast_to is None else result.astype(cast_to)
        # Scripts use these attributes to seed one variable, or to copy its state.
        result.rng, result.update = generator, (generator, next_state)
        return result

    def _draw_uniform(self, size: Any, transform: Callable[[Any], Any]) -> Any:
        """Return uniform numbers between 0 and 1 after applying ``transform``."""
        return self._draw(pt.random.uniform, 0.0, 1.0, size=size, dtype=pytensor.config.floatX, transform=transform)

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
        return self._draw(pt.random.uniform, low, high, size=size, dtype=dtype or pytensor.config.floatX)

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
        """Draw from the normal distribution.  With ``truncate``, draw within two standard deviations of the mean."""
        if truncate:
            return self.truncated_normal(size, avg, std, dtype=dtype)
        return self._draw(pt.random.normal, avg, std, size=size, dtype=dtype or pytensor.config.floatX)

    def truncated_normal(
        self,
        size: Any = None,
        avg: Any = 0.0,
        std: Any = 1.0,
        ndim: Any = None,
        dtype: Any = None,
        nstreams: Any = None,
    ) -> Any:
        """Draw from the normal distribution within two standard deviations of the mean."""
        low, high = 0.022750131948179212, 0.9772498680518208  # the distribution function at -2 and 2
        dtype = dtype or pytensor.config.floatX

        def to_truncated_normal(probability: Any) -> Any:
            return avg + std * np.sqrt(2.0) * pt.erfinv(2 * probability - 1)

        return self._draw(
            pt.random.uniform, low, high, size=size, dtype=dtype, transform=to_truncated_normal, cast_to=dtype
        )

    # -- discrete ----------------------------------------------------------------------------------------------------

    def binomial(
        self, size: Any = None, n: Any = 1, p: Any = 0.5, ndim: Any = None, dtype: Any = "int64", nstreams: Any = None
    ) -> Any:
        """Draw the number of successes in ``n`` trials, each with probability ``p``."""
        if isinstance(n, int | np.integer) and n == 1:
            # A comparison is much cheaper than the general algorithm.  Dropout uses it.
            p = pt.as_tensor_variable(p)
            return self._draw_uniform(
                p.shape if size is None else size, lambda uniforms: pt.lt(uniforms, p).astype(dtype)
            )
        return self._draw(pt.random.binomial, n, p, size=size, cast_to=dtype)

    def random_integers(
        self, size: Any = None, low: Any = 0, high: Any = 1, ndim: Any = None, dtype: Any = "int64"
    ) -> Any:
        """Draw integers from ``low`` to ``high``, both included."""
        return self._draw(pt.random.integers, low, high + 1, size=size, cast_to=dtype)

    def poisson(self, size: Any = None, lam: Any = 1.0, ndim: Any = None, dtype: Any = "int64") -> Any:
        """Draw from the Poisson distribution with mean ``lam``."""
        return self._draw(pt.random.poisson, lam, size=size, cast_to=dtype)

    def choice(
        self,
        size: Any = None,
        a: Any = 2,
        replace: bool = True,
        p: Any = None,
        ndim: Any = None,
        dtype: Any = "int64",
        nstreams: Any = None,
    ) -> Any:
        """Draw from ``0 ... a - 1``, or from the elements of an array ``a``, with probabilities ``p``."""
        return self._draw(pt.random.choice, a, size=size, replace=replace, p=p, cast_to=dtype)

    def multinomial(
        self,
        size: Any = None,
        n: Any = 1,
        pvals: Any = (0.5, 0.5),
        ndim: Any = None,
        dtype: Any = "int64",
        nstreams: Any = None,
    ) -> Any:
        """Draw the counts of each outcome in ``n`` trials.  ``pvals`` has a row of probabilities for each draw."""
        return self._draw(pt.random.multinomial, n, pvals, size=size, cast_to=dtype)

    def permutation(self, size: Any = None, n: Any = 1, ndim: Any = None, dtype: Any = "int64") -> Any:
        """Draw a permutation of ``0 ... n - 1``, or, with ``size``, an array of them."""
        if size is None:
            return self._draw(pt.random.permutation, n, cast_to=dtype)
        return self._draw_uniform((*_to_size(size), n), lambda sort_keys: pt.argsort(sort_keys, axis=-1).astype(dtype))

    def shuffle_row_elements(self, input: Any) -> Any:
        """Shuffle the elements of each row of a matrix independently."""
        return self._draw_uniform(
            input.shape, lambda sort_keys: pt.take_along_axis(input, pt.argsort(sort_keys, axis=-1), axis=-1)
        )


def _to_size(size: Any) -> Any:
    """Convert the size of a draw, an integer or a sequence, to a tuple.  Return a shape variable or None unchanged."""
    if isinstance(size, int | np.integer):
        return (int(size),)
    return tuple(size) if isinstance(size, list | tuple) else size
