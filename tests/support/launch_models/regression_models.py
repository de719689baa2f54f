"""Regressions as subclasses of `synkhronos.launcher.Model`, for PyTensor and Theano."""

import numpy as np
import theano
import theano.tensor as T
from masks import make_masked_rows

from synkhronos.launcher import Model
from synkhronos.training.train_function.training_graph import build_local_updates
from synkhronos.training.updates import adamw, lion, sgd


class LinearRegression(Model):
    """Linear regression with one vector of weights."""

    batch_size, n_epochs, rate = 10, 8, 0.05

    def build(self):
        x, y = T.matrix("x", dtype="float64"), T.vector("y", dtype="float64")
        w = theano.shared(np.random.normal(size=3), "w")
        self.inputs, self.params = [x, y], [w]
        self.loss = ((T.dot(x, w) - y) ** 2).mean()
        self.error = abs(T.dot(x, w) - y).max()

    def load(self):
        x = np.random.default_rng(0).normal(size=(165, 3))
        y = x @ [1.0, 2.0, 3.0]
        return [x[:120], y[:120]], [x[120:], y[120:]]


class MaskedRegression(LinearRegression):
    """The loss is a mean over the numbers that a mask selects, none in some batches; the learning rate is almost 0."""

    batch_size, n_epochs, rate = 2, 2, 1e-12

    def build(self):
        x, y, mask = T.dmatrix("x"), T.dmatrix("y"), T.dmatrix("mask")
        w, average = theano.shared(np.zeros(3), "w"), theano.shared(np.zeros(3), "average")
        self.inputs, self.params, self.weight = [x, y, mask], [w], mask.sum()
        self.loss = (mask * (x * w - y) ** 2).sum() / self.weight
        self.error = (mask * abs(x * w - y)).sum() / self.weight
        self.averages = {average: 0.9 * average + 0.1 * x.mean(axis=0)}

    def load(self):
        x, y, mask = make_masked_rows()
        return [x[:40], y[:40], mask[:40]], [x[40:], y[40:], mask[40:]]


class SgdMaskedRegression(MaskedRegression):
    """`MaskedRegression` with plain gradient descent."""

    rate = 0.1

    def updates(self, loss_or_grads, params, learning_rate):
        return build_local_updates(sgd(loss_or_grads, params, learning_rate=learning_rate, weight=self.weight))


class UnweightedMaskedRegression(MaskedRegression):
    """`MaskedRegression` without a weight; its mask selects all numbers."""

    def build(self):
        super().build()
        self.weight = None

    def load(self):
        (x, y, _), valid = super().load()
        return [x, y, np.ones_like(x)], valid[:2] + [np.ones_like(valid[0])]


class RankIndependentRegression(LinearRegression):
    """Batches of all ranks together have the same rows on 1, 2 and 3 ranks; the session sets options."""

    n_epochs, rate = 3, 0.05

    def __init__(self, config):
        self.batch_size = 12 // config["size"]
        super().__init__(config)

    def build(self):
        x, y = T.matrix("x", dtype="float64"), T.vector("y", dtype="float64")
        w = theano.shared(np.zeros(3), "w")
        average = theano.shared(np.zeros(3), "average")
        self.inputs, self.params = [x, y], [w]
        self.loss = ((T.dot(x, w) - y) ** 2).mean()
        self.error = abs(T.dot(x, w) - y).mean()
        self.averages = {average: 0.9 * average + 0.1 * x.mean(axis=0)}


class ShardedRegression(RankIndependentRegression):
    """Regression with a sharded optimizer, which prints the shapes of the shards at the end."""

    shard_optimizer = True

    def cleanup(self):
        print("shapes", [variable.shard.get_value().shape for variable in self.sharded_variables.values()])


class AdamwRegression(RankIndependentRegression):
    """Regression with AdamW, whose state has several variables; its step count is not sharded."""

    def updates(self, loss_or_grads, params, learning_rate):
        return adamw(loss_or_grads, params, learning_rate=learning_rate)


class LasagneStyleRegression(RankIndependentRegression):
    """Its updates are a dictionary, as those of Lasagne's functions; the class sets a clipping norm."""

    clip_norm, ema = 0.5, 0.9

    def updates(self, loss_or_grads, params, learning_rate):
        return {p: p - learning_rate * g for p, g in zip(params, loss_or_grads, strict=True)}


class LionRegression(LinearRegression):
    """Its steps are signs, which are equal on all ranks while the parameters are far from the optimum."""

    batch_size = 60

    def load(self):
        (x, _), (x_valid, _) = super().load()
        return [x, x.sum(axis=1) * 9], [x_valid, x_valid.sum(axis=1) * 9]

    def updates(self, loss_or_grads, params, learning_rate):
        return build_local_updates(lion(loss_or_grads, params, learning_rate=learning_rate / 100))


class RegressionWithoutValidation(LinearRegression):
    """Regression on training data alone."""

    def load(self):
        return super().load()[0], []


class OverflowingRegression(RankIndependentRegression):
    """Row 0 is so large that its scaled gradient overflows: on the rank that has it, in one step of each epoch."""

    n_epochs, rate, loss_scale, ema = 3, 0.05, "dynamic", 0.9

    def build(self):
        x, y = T.matrix("x", dtype="float32"), T.vector("y", dtype="float32")
        w = theano.shared(np.zeros(3, "float32"), "w")
        self.inputs, self.params = [x, y], [w]
        self.loss = ((T.dot(x, w) - y) ** 2).mean()

    def load(self):
        (x, y), valid = super().load()
        x[0], y[0] = [1e18, 0, 0], -1e18
        return [x.astype("float32"), y.astype("float32")], [array.astype("float32") for array in valid]

    def updates(self, loss_or_grads, params, learning_rate):
        return {p: p - learning_rate * g for p, g in zip(params, loss_or_grads, strict=True)}

    def cleanup(self):
        state = {entry.variable.name: entry.variable.get_value() for entry in self._apply_fn.maker.inputs}
        values = [state[name].tolist() for name in ("loss_scale", "loss_scale_steps", "w", "w_ema")]
        print(f"state {values}\n", end="")


class AlwaysOverflowingRegression(OverflowingRegression):
    """The scaled gradients of all steps of the first epoch overflow."""

    def load(self):
        (x, y), valid = super().load()
        x[:], y[:] = [1e19, 0, 0], -5e18
        return [x, y], valid


class ConfiguredRegression(RankIndependentRegression):
    """Regression whose attributes are set to the options in the session's config."""

    def __init__(self, config):
        vars(self).update(config["options"])
        super().__init__(config)
