"""Variants of `MLP`: some record a run, others break the contract of model classes."""

import json
import os
import random
import signal
import sys
import time

import numpy as np
import theano
from theano.sandbox.rng_mrg import MRG_RandomStreams

from launch_models.mlp import MLP
from synkhronos.launcher import SettingsError
from synkhronos.training.loops import stop_signals


class TracingMLP(MLP):
    """Records on each rank its initial parameters, and its parameters and batch of each step."""

    def __init__(self, config):
        super().__init__(config)
        self.initial_sum = float(self.w1.get_value().sum())
        self.trace = []
        self.folder = config["trace"]

    def train_iter(self, count, recorder):
        before = float(self.w1.get_value().sum())
        super().train_iter(count, recorder)
        batch = self.data.shard[self.current_t - 1]
        self.trace.append([self.epoch, count, before, float(batch[0].sum())])

    def cleanup(self):
        with open(os.path.join(self.folder, f"trace-{self.rank}.json"), "w") as file:
            json.dump({"initial_sum": self.initial_sum, "trace": self.trace, "random": float(np.random.random())}, file)


class RefusingMLP(MLP):
    """Refuses a setting of ``config``, as a class of a user may."""

    def __init__(self, config):
        raise SettingsError(f"config: RefusingMLP has no {sorted(config)[0]!r}")


class UnequalShapesMLP(MLP):
    """Parameters have another shape on rank 1."""

    def compile_iter_fns(self, sync_type="avg"):
        if self.rank == 1:
            self.w1.set_value(np.zeros((5, 9), "float32"))


class EqualSeedsMLP(MLP):
    """Prints random numbers of a generator with the same seed on all ranks; the first step takes two seconds."""

    def compile_iter_fns(self, sync_type="avg"):
        super().compile_iter_fns(sync_type)
        self.draw = theano.function([], MRG_RandomStreams(7).uniform((2,)))

    def train_iter(self, count, recorder):
        if count == 0:  # as long as a compilation
            time.sleep(2)
        super().train_iter(count, recorder)

    def cleanup(self):
        print("drawn", self.draw().tolist())


class RandomRateMLP(MLP):
    """Draws a learning rate for each step."""

    def train_iter(self, count, recorder):
        before = self.shared_lr.get_value()
        self.shared_lr.set_value(np.float32(before * np.random.random() * random.random() * 3))
        super().train_iter(count, recorder)
        self.shared_lr.set_value(before)


class OverfittingMLP(MLP):
    """Validation gets better until the third epoch, and worse from then on."""

    def val_iter(self, count, recorder):
        recorder.val_error(count, 1.0, abs(self.epoch - 2) / 10, 1 - abs(self.epoch - 2) / 10)


class StuckMLP(MLP):
    """Does not return from the fourth step."""

    def train_iter(self, count, recorder):
        if count == 3:
            time.sleep(1000)
        super().train_iter(count, recorder)


class RenamedMLP(MLP):
    """`MLP` under another name."""


class UnicodePrintingMLP(MLP):
    """Prints characters outside of ASCII, and a lone surrogate, which no encoding has."""

    def compile_iter_fns(self, sync_type="avg"):
        super().compile_iter_fns(sync_type)
        print("größer → \udcff")


class UnequalBatchesMLP(MLP):
    """Rank 1 has fewer batches."""

    def train_iter(self, count, recorder):
        super().train_iter(count, recorder)
        if self.rank == 1:
            self.data.n_batch_train = 4


class GrowingEpochsMLP(MLP):
    """MLP whose number of batches grows from epoch to epoch, on rank 1 faster than on rank 0."""

    def train_iter(self, count, recorder):
        super().train_iter(count, recorder)
        self.data.n_batch_train = 2 + self.epoch * (1 + self.rank)


class FailingMLP(MLP):
    def train_iter(self, count, recorder):
        if self.rank == 1 and count == 3:
            raise ValueError("the third batch is damaged")
        super().train_iter(count, recorder)


class MpiMLP(MLP):
    """Uses MPI by itself: each rank is an MPI process of its own."""

    def __init__(self, config):
        super().__init__(config)
        is_imported = "mpi4py" in sys.modules
        from mpi4py import MPI

        print("imported before:", is_imported, "size:", MPI.COMM_WORLD.Get_size(), "sum:", MPI.COMM_WORLD.allreduce(3))
        self.finalize = MPI.Finalize

    def cleanup(self):
        self.finalize()


class DyingMLP(MLP):
    """One rank exits in the third step of some epochs, once in each; none if the victim is 2."""

    def train_iter(self, count, recorder):
        mark = os.path.join(self.folder, f"died-{self.epoch}")
        if self.rank == self.victim and count == 2 and self.epoch in self.epochs and not os.path.exists(mark):
            with open(mark, "w") as file:
                file.write(sys.argv[-1])  # the master's arguments, which forks have, too
            if self.is_raising:
                raise ValueError(f"epoch {self.epoch} is damaged")
            if self.exit_code is not None:
                os._exit(self.exit_code)
            os.kill(os.getppid() if self.kills_parent else os.getpid(), signal.SIGKILL)
            time.sleep(10 * self.kills_parent)
        super().train_iter(count, recorder)

    def __init__(self, config):
        super().__init__(config)
        self.folder, self.victim, self.epochs = config["marks"], config["victim"], config["epochs"]
        self.is_raising, self.exit_code = config.get("raising", False), config.get("exit_code")
        self.kills_parent = config.get("parent", False)


class HostKillingMLP(MLP):
    """Rank 0 of two kills the simulated host b in the third step of the second epoch."""

    def train_iter(self, count, recorder):
        if (self.rank, self.size, self.epoch, count) == (0, 2, 1, 2):
            from hosts import simulated

            assert simulated.send_request({"operation": "kill", "host": "b"}) == 0
        super().train_iter(count, recorder)


class GpuLosingMLP(MLP):
    """The last rank of three exits in the third step of the second epoch; its host has a fake GPU less then."""

    def train_iter(self, count, recorder):
        if (self.rank, self.size, self.epoch, count) == (2, 3, 1, 2):
            with open("/dev/shm/fake_gpus", "w") as file:  # each simulated host has a folder of its own there
                file.write("1")
            os._exit(1)
        super().train_iter(count, recorder)


class ExitingMLP(MLP):
    """Rank 1 exits with 7 in the fourth iteration, or another rank with another code."""

    exiting_rank, code = 1, 7

    def train_iter(self, count, recorder):
        if self.rank == self.exiting_rank and count == 3:
            sys.stdout.flush()
            os._exit(self.code)
        super().train_iter(count, recorder)


class ExitingWithoutErrorMLP(ExitingMLP):
    """Rank 0 exits with 0, as a library may do."""

    exiting_rank, code = 0, 0


class DivergingMLP(MLP):
    """The cost is NaN, and so are the parameters of all ranks."""

    def train_iter(self, count, recorder):
        super().train_iter(count, recorder)
        for param in self.params:
            param.set_value(param.get_value() * np.float32("nan"))
        recorder.train_error(count, float("nan"))


class NoMethods:
    pass


class NoParams(MLP):
    def compile_iter_fns(self, sync_type="avg"):
        self.params = None


class NonVariableParams(MLP):
    def compile_iter_fns(self, sync_type="avg"):
        self.params = [self.w1, 3]


class WithoutData(MLP):
    def compile_iter_fns(self, sync_type="avg"):
        self.data = None


class InvalidBatchCount(MLP):
    def compile_iter_fns(self, sync_type="avg"):
        self.data.n_batch_val = "many"


class RaisingMLP(MLP):
    """A model whose iterations raise an error."""

    def train_iter(self, count, recorder):
        raise KeyError("images")


class SilentMLP(MLP):
    """A model that calls nothing of the recorder."""

    def train_iter(self, count, recorder):
        pass

    def val_iter(self, count, recorder):
        pass


class WithTwoArguments(MLP):
    def __init__(self, config, more):
        super().__init__(config)


class NoEpochs(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.n_epochs = None


class UnknownRecorderCall(MLP):
    def train_iter(self, count, recorder):
        recorder.celebrate()


not_a_class = 3


class SignalledMLP(RandomRateMLP):
    """Gets a scheduler's signal in the middle of an epoch, or of its validation, which draws random numbers, too."""

    def __init__(self, config):
        super().__init__(config)
        stop_signals.CHECK_INTERVAL_SECONDS = 0.0  # ranks that step together ask after each step
        self.signal_place = config.get("signal_at")  # mode, epoch and count of the iteration

    def train_iter(self, count, recorder):
        super().train_iter(count, recorder)
        self.signal_if_due("train", count)

    def compile_iter_fns(self, sync_type="avg"):
        super().compile_iter_fns(sync_type)
        self.draw = theano.function([], MRG_RandomStreams(7).uniform(()))

    def val_iter(self, count, recorder):
        cost, error = self.val_fn(*self.data.val[self.current_v])
        noise = float(self.draw()) + np.random.random() + random.random()
        recorder.val_error(count, cost + noise, error, 0.0)
        self.current_v = (self.current_v + 1) % self.data.n_batch_val
        self.signal_if_due("val", self.current_v)

    def signal_if_due(self, mode, count):
        if self.rank == 0 and self.signal_place == [mode, self.epoch, count]:
            os.kill(os.getpid(), signal.SIGTERM)


class SlowMLP(MLP):
    """Iterations take 20 ms longer."""

    def train_iter(self, count, recorder):
        time.sleep(0.02)
        super().train_iter(count, recorder)
