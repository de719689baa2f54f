"""A small model of PyMC, and a callback of its sampler."""

import pymc as pm


def build_small_model(rows):
    """Return a regression of the first column of an array of shape (rows, 3) on all three."""
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        pm.Normal("y", rows @ b, 1, observed=rows[:, 0])
    return model


class CallbackAfterDraws:
    """Callback of `pm.sample` that runs an action after some draws."""

    def __init__(self, draws, action):
        self.draws, self.action = draws, action

    def __call__(self, trace, draw):
        self.draws -= 1
        if self.draws == 0:
            self.action()
