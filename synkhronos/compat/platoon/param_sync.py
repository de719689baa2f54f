"""Rules by which a worker's parameters and the shared ones change at `Worker.sync_params`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class ParamSyncRule:
    """Base class of rules: a rule has either `update_params` or `theano_update`."""

    def make_update_function(self, local_params: Sequence[Any]) -> Callable[[Sequence[np.ndarray]], None]:
        """Return the function that `Worker.sync_params` calls with the shared parameters.

        Parameters
        ----------
        local_params : list of shared variable
            The worker's parameters.

        Returns
        -------
        callable
            Changes the shared parameters, a list of ndarray, in place, and sets the worker's.
        """
        try:
            function = self.theano_update(local_params)
        except NotImplementedError:
            return lambda master_params: self._update(local_params, master_params)

        def update(master_params: Sequence[np.ndarray]) -> None:
            for master, value in zip(master_params, function(*master_params), strict=True):
                master[...] = value

        return update

    def _update(self, local_params: Sequence[Any], master_params: Sequence[np.ndarray]) -> None:
        values = [np.array(param.get_value()) for param in local_params]
        self.update_params(values, master_params)
        for param, value in zip(local_params, values, strict=True):
            param.set_value(value)

    def theano_update(self, local_params: Sequence[Any]) -> Callable[..., Sequence[np.ndarray]]:
        """Return a compiled function: from the shared parameters to their new values; it updates the worker's."""
        raise NotImplementedError

    def update_params(self, local_params: list[np.ndarray], master_params: Sequence[np.ndarray]) -> None:
        """Change values of the worker's parameters and the shared parameters in place."""
        raise NotImplementedError


class EASGD(ParamSyncRule):
    """Elastic averaging: both sides move towards each other by ``alpha`` times their difference.

    Parameters
    ----------
    alpha : float
    """

    def __init__(self, alpha: float):
        self.set_alpha(alpha)

    def get_alpha(self) -> float:
        """Return alpha."""
        return self.alpha

    def set_alpha(self, alpha: float) -> None:
        """Set alpha, from the next exchange on."""
        self.alpha = alpha

    def update_params(self, local_params: list[np.ndarray], master_params: Sequence[np.ndarray]) -> None:
        """Move both sides.

        Examples
        --------
        >>> local, master = np.array([4.0]), np.array([0.0])
        >>> EASGD(0.25).update_params([local], [master])
        >>> local, master
        (array([3.]), array([1.]))
        """
        for local, master in zip(local_params, master_params, strict=True):
            force = local.dtype.type(self.alpha) * (local - master)
            local -= force
            master += force


class ASGD(ParamSyncRule):
    """Asynchronous descent: a worker adds its own change to the shared parameters, and goes on from these."""

    def make_update_function(self, local_params: Sequence[Any]) -> Callable[[Sequence[np.ndarray]], None]:
        """Return the function that `Worker.sync_params` calls; changes count from this call on."""
        self.old_locals = [np.array(param.get_value()) for param in local_params]
        return super().make_update_function(local_params)

    def update_params(self, local_params: list[np.ndarray], master_params: Sequence[np.ndarray]) -> None:
        """Add the change since the last exchange to the shared parameters, and copy these."""
        for old, local, master in zip(self.old_locals, local_params, master_params, strict=True):
            master += local - old
            local[...] = old[...] = master
