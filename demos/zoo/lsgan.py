"""LSGAN, for MNIST's digits.

References
----------
.. [1] Mao, X. et al. (2016): Least squares generative adversarial networks. arXiv:1611.04076.
"""

from __future__ import annotations

from typing import Any

import lasagne

from gan import GAN


class LSGAN(GAN):
    """The critic learns 1 for real digits and 0 for generated ones; the generator learns to get 1 from it."""

    rate = 2e-4

    def updates(self, loss_or_grads: Any, params: list[Any], learning_rate: Any) -> Any:
        """Return the updates of parameters."""
        return lasagne.updates.adam(loss_or_grads, params, learning_rate, beta1=0.5)

    def losses(self, real: Any, fake: Any) -> tuple[Any, Any]:
        """Return the critic's loss and the generator's."""
        critic = 0.5 * ((real - 1) ** 2).mean() + 0.5 * (fake**2).mean()
        return critic, 0.5 * ((fake - 1) ** 2).mean()
