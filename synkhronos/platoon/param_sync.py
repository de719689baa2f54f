"""Exchange rules between a worker's parameters and the shared parameters, for `Worker.sync_params`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class ParamSyncRule:
    """Base class of rules; a subclass defines either `update_params` or `theano_update`."""

    def make_update_function(self, local_params: Sequence[Any]) -> Callable[[Sequence[np.ndarray]], None]:
        """Return a function of the shared parameters that updates them in place, and sets the worker's parameters."""
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
        """Return a compiled function from the shared parameters to their new values; it updates the worker's."""
        raise NotImplementedError

    def update_params(self, local_params: list[np.ndarray], master_params: Sequence[np.ndarray]) -> None:
        """Update the values of the worker's and of the shared parameters in place."""
        raise NotImplementedError


class EASGD(ParamSyncRule):
    """Elastic averaging: worker and shared parameters move by ``alpha`` times their difference towards each other."""

    def __init__(self, alpha: float):
        self.set_alpha(alpha)

    def get_alpha(self) -> float:
        """Return the current alpha."""
        return self.alpha

    def set_alpha(self, alpha: float) -> None:
        """Set alpha, the fraction of the difference by which both sides move in later exchanges."""
        self.alpha = alpha

    def update_params(self, local_params: list[np.ndarray], master_params: Sequence[np.ndarray]) -> None:
        for local, master in zip(local_params, master_params, strict=True):
            force = local.dtype.type(self.alpha) * (local - master)
            local -= force
            master += force


class ASGD(ParamSyncRule):
    """Asynchronous SGD: a worker adds its change to the shared parameters, and continues from these."""

    def make_update_function(self, local_params: Sequence[Any]) -> Callable[[Sequence[np.ndarray]], None]:
        """Return the function of `Worker.sync_params`; a worker's change is counted from this call on."""
        self.old_locals = [np.array(param.get_value()) for param in local_params]
        return super().make_update_function(local_params)

    def update_params(self, local_params: list[np.ndarray], master_params: Sequence[np.ndarray]) -> None:
        for old_local, local, master in zip(self.old_locals, local_params, master_params, strict=True):
            master += local - old_local
            local[...] = old_local[...] = master
