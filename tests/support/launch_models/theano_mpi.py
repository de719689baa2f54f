"""Classes in the manner of Theano-MPI's: a step in two parts for several workers, or in one for one."""

import json
import os

import numpy as np
import theano
import theano.tensor as T

from launch_models.data.regression import MOMENTUM, RATE, ROWS, Data


class Regression:
    """Linear regression with momentum."""

    def __init__(self, config):
        self.rank, self.size, self.verbose = config["rank"], config["size"], config["verbose"]
        self.config = config
        self.name = "Regression"
        self.n_epochs, self.epoch, self.n_subb, self.batch_size = config.get("n_epochs", 2), 0, 1, ROWS
        self.data = self.make_data()
        self.x, self.y = T.fmatrix("x"), T.fvector("y")
        self.w = theano.shared(np.zeros(3, "float32"), "w")
        self.b = theano.shared(np.zeros((), "float32"), "b")
        self.params = [self.w, self.b]
        self.shared_lr = theano.shared(np.float32(RATE), "lr")
        self.cost = ((T.dot(self.x, self.w) + self.b - self.y) ** 2).mean()
        self.next_batch = 0

    def make_data(self):
        return Data(self.rank, self.size)

    def compile_iter_fns(self, *args, **kwargs):
        self.compile(self.size)

    def compile(self, n_workers):
        self.vels, self.vels2 = [], []
        first, second = [], []
        for param in self.params:
            own = theano.shared(np.zeros_like(param.get_value()))
            first.append((own, np.float32(MOMENTUM) * own + T.grad(self.cost, param)))
            if n_workers == 1:
                first.append((param, param - self.shared_lr * first[0 if param is self.w else 2][1]))
                continue
            summed = theano.shared(np.zeros_like(param.get_value()))
            second.append((param, param - self.shared_lr * summed / np.float32(n_workers)))
            self.vels.append(own)
            self.vels2.append(summed)
        self.compiled = [theano.function([self.x, self.y], self.cost, updates=first)]
        self.compiled.append(theano.function([], [], updates=second))
        self.val_fn = theano.function([self.x, self.y], self.cost)

    def train_iter(self, count, recorder):
        recorder.start()
        self.compiled[1]()
        cost = self.compiled[0](*self.data.batches[self.next_batch])
        self.next_batch = (self.next_batch + 1) % len(self.data.batches)
        recorder.train_error(count, cost, 0.0)
        recorder.end("calc")

    def val_iter(self, count, recorder):
        recorder.val_error(count, self.val_fn(*self.data.batches[0]), 0.5, 0.25)

    def reset_iter(self, mode):
        if mode == "train":
            self.next_batch = 0

    def adjust_hyperp(self, epoch):
        pass

    def scale_lr(self, size):
        self.shared_lr.set_value(np.float32(self.shared_lr.get_value() * size))

    def cleanup(self):
        pass


class RecordingRegression(Regression):
    """Records the calls of its methods, and plots."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = [["config", sorted(set(config) - {"trace"})]]
        self.n_subb = 2

    def record_call(self, name, *arguments):
        self.calls.append([name, *arguments])

    def compile_iter_fns(self, sync_type="neither"):
        self.record_call("compile_iter_fns", sync_type, self.size)
        super().compile_iter_fns()

    def train_iter(self, count, recorder):
        self.record_call("train_iter", self.epoch, count, float(self.shared_lr.get_value()))
        super().train_iter(count, recorder)

    def val_iter(self, count, recorder):
        self.record_call("val_iter", count)
        super().val_iter(count, recorder)

    def reset_iter(self, mode):
        self.record_call("reset_iter", mode)
        super().reset_iter(mode)

    def adjust_hyperp(self, epoch):
        self.record_call("adjust_hyperp", epoch)

    def print_info(self, recorder, verbose=None):
        self.record_call(
            "print_info", verbose, self.current_info == recorder.get_latest_val_info(), self.current_info[:1]
        )
        if self.epoch == 0:
            recorder.plot_init(name="scores", save=False)
            recorder.plot_init(name="a/sample", save=False)
        recorder.plot(name="scores", lines=[[1, 2, 3], [3, 2]], lw=2, save=False)
        recorder.plot(name="a/sample", image=np.eye(3), cmap="gray")

    def save(self, path="./"):
        self.record_call("save", self.epoch)
        np.savez(path + f"{self.epoch}_mine.npz", self.w.get_value())

    def cleanup(self):
        with open(os.path.join(self.config["trace"], f"calls-{self.rank}.json"), "w") as file:
            json.dump(self.calls, file)


class StoppingRegression(Regression):
    """Validates batches 0 and 2, and stops rank 1's validation in epoch 2."""

    def __init__(self, config):
        super().__init__(config)
        self.n_epochs = 5
        self.n_validated = 0

    def val_iter(self, count, recorder):
        super().val_iter(count, recorder)
        self.n_validated += 1
        print("val_iter", self.epoch, self.n_validated)
        if self.epoch == 1 and self.rank == 1:
            return "stop"
        if self.n_validated == 1:
            return 2
        return None

    def reset_iter(self, mode):
        super().reset_iter(mode)
        self.n_validated = 0


class NormalizedRegression(Regression):
    """Regression with a parameter called "beta", as in batch normalization."""

    def __init__(self, config):
        super().__init__(config)
        self.b.name = "beta"
        print("start", self.rank)

    def cleanup(self):
        print("beta", repr(float(self.b.get_value())), "w", repr(self.w.get_value().tolist()))


class OneFunctionRegression(Regression):
    """Compiles a step as one function, for any size."""

    def compile_iter_fns(self, sync_type="avg"):
        self.compile(1)


class UntrainedRegression(Regression):
    """Calls a function that updates no parameter."""

    def compile_iter_fns(self):
        self.compile(1)
        self.compiled[0] = self.val_fn


class EqualRowsRegression(OneFunctionRegression):
    """All ranks train on the same rows."""

    def make_data(self):
        return Data(0, 1)


class EqualRowsTwoFunctionRegression(Regression):
    """All ranks train on the same rows, by a step of two functions."""

    make_data = EqualRowsRegression.make_data


class RegressionWithoutVels2(Regression):
    """Regression with velocities in `vels`, and none in `vels2`."""

    def compile(self, n_workers):
        super().compile(n_workers)
        self.vels2 = []
