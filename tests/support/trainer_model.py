"""A linear regression for tests of the trainer, which counts the uses of each row."""

from functools import partial

import numpy as np
from library import NAME, XLA, shared, tensor

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.loading import Loader
from synkhronos.training import make_trainer
from synkhronos.training.updates import momentum, nesterov_momentum, sgd

ROWS = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4))
W = np.array([1.0, -2.0, 0.5, 3.0])
Y = X @ W

ALL = {
    "BSP": (exchange_rules.BSP, sgd),
    "BSP of parameters": (lambda: exchange_rules.BSP("params"), sgd),
    "LocalSGD": (lambda: exchange_rules.LocalSGD(3), momentum),
    "PostLocal": (lambda: exchange_rules.PostLocal(3, 5), sgd),
    "SlowMo": (lambda: exchange_rules.SlowMo(3), sgd),
    "DiLoCo": (lambda: exchange_rules.DiLoCo(3, momentum=0.5), sgd),
    "EASGD": (lambda: exchange_rules.EASGD(period=2), sgd),
    "EASGD together": (lambda: exchange_rules.EASGD(period=2, asynchronous=False), sgd),
    "EAMSGD": (lambda: exchange_rules.EAMSGD(period=2, momentum=0.5), nesterov_momentum),
    "Downpour": (exchange_rules.Downpour, sgd),
    "ASGD": (lambda: exchange_rules.ASGD(2), sgd),
    "GoSGD": (lambda: exchange_rules.GoSGD(0.5), sgd),
    "Swap": (lambda: exchange_rules.Swap(3), sgd),
}
#: Rules under which the result does not depend on the ranks' timing.
SYNCHRONOUS = ["BSP", "BSP of parameters", "LocalSGD", "PostLocal", "SlowMo", "DiLoCo", "EASGD together", "Swap"]
if XLA:  # a rule takes seconds to compile
    ALL = {name: ALL[name] for name in ("BSP", "LocalSGD", "DiLoCo", "EASGD", "EAMSGD", "ASGD", "GoSGD")}
    SYNCHRONOUS = ["LocalSGD"]  # one is enough for the tests that run every one of them


class Model:
    """Linear regression with its trainer, whose rule is given by name."""

    def __init__(self, name, rows=ROWS, rate=0.05, noise=False, update=None, **kwargs):
        make, default = ALL[name]
        update = update or default
        self.rule = make()
        self.x, self.y, self.row_numbers = tensor.dmatrix("x"), tensor.dvector("y"), tensor.lvector("row_numbers")
        self.w, self.b = shared(np.zeros(4), "w"), shared(np.zeros(1), "b")
        self.counts = shared(np.zeros(rows), "counts")
        x = self.x
        if noise:
            x = x + 0.1 * draw_row_noise()
        error = tensor.dot(x, self.w) + self.b[0] - self.y
        self.loss = (error**2).mean()
        counted = tensor.inc_subtensor(
            self.counts[self.row_numbers], tensor.ones_like(self.row_numbers, dtype="float64")
        )
        self.trainer = make_trainer(
            self.loss, [self.w, self.b], self.x, [self.y, self.row_numbers], update, self.rule, rate,
            validate={"mse": self.loss + 0.0 * self.row_numbers.sum()}, extra_updates=[(self.counts, counted, None)], **kwargs,
        )  # fmt: skip

    def epochs(self, batch_size=5, epochs=2, rows=ROWS, valid=None, **kwargs):
        valid = None if valid is None else (valid[0], [valid[1], np.arange(len(valid[1]))])
        return self.trainer.epochs(X[:rows], [Y[:rows], np.arange(rows)], batch_size, epochs, valid=valid, **kwargs)

    def count_uses(self):
        return np.sum(synk.gather(self.counts, nd_up=1), axis=0)

    def values(self):
        return np.concatenate([np.asarray(self.w.get_value()), np.asarray(self.b.get_value())])


def make_epochs(model, source, n_epochs, **kwargs):
    """Return the reports of a run that survives deaths, on rows of a source: "arrays", a "loader" or "parts"."""
    arrays = [X, Y, np.arange(len(Y))]
    if source == "loader":
        rows = Loader(arrays, processes=1), None
        valid = Loader(arrays, shuffle=False, processes=1)
    elif source == "parts":
        parts = [synk.data_parts(partial(take_rows, array), len(Y)) for array in arrays]
        rows = valid = parts[0], parts[1:]
    else:
        rows = valid = X, arrays[1:]
    return model.trainer.epochs(*rows, 5, n_epochs, valid=valid, on_death="continue", **kwargs)


def take_rows(array, start, stop):
    """Load rows of `data_parts`."""
    return array[start:stop]


def draw_row_noise():
    if NAME == "pytensor":
        from pytensor.tensor.random.utils import RandomStream

        return RandomStream(3).normal(size=(4,))
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    # By default it has 15,360 streams, which every checkpoint would contain.
    return MRG_RandomStreams(3).normal(size=(4,), nstreams=4)
