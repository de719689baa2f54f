"""WGAN, for MNIST's digits.

References
----------
.. [1] Arjovsky, M., Chintala, S. and Bottou, L. (2017): Wasserstein GAN. arXiv:1701.07875.
"""

from __future__ import annotations

from typing import Any

import lasagne
import theano.tensor as T

from gan import GAN


class WGAN(GAN):
    """The critic's loss is the negative distance of real and generated digits; weights are clipped after each step."""

    rate, critic_steps, clip = 5e-5, 5, 0.01
    settings = (*GAN.settings, "clip")
    updates = staticmethod(lasagne.updates.rmsprop)

    def losses(self, real: Any, fake: Any) -> tuple[Any, Any]:
        """Return the critic's loss and the generator's."""
        return fake.mean() - real.mean(), -fake.mean()

    def critic_updates(self, loss: Any, params: list[Any]) -> Any:
        """Return the critic's new parameters, clipped."""
        updates = super().critic_updates(loss, params)
        return {**updates, **{param: T.clip(updates[param], -self.clip, self.clip) for param in params}}
