"""An engine in one file: its outputs are read later, and one or several training steps are one launch."""

import numpy as np

from synkhronos.engines.engine import Runner
from synkhronos.engines.lazy import LazyEngine


class Handle:
    """Stands for an output until it is fetched."""

    def __init__(self, value):
        self.value = value


class Launch(Runner):
    """Some functions, one after the other, many times: the first takes inputs and returns outputs."""

    #: Number of launches in this process; tests read it.
    n_launches = 0

    def __init__(self, first, further_functions=(), n_repeats=1):
        super().__init__(first)
        self.first, self.further_functions, self.n_repeats = first, further_functions, n_repeats

    def __call__(self, *inputs):
        Launch.n_launches += 1
        results = []
        for k in range(self.n_repeats):
            results.append(super().__call__(*(np.split(array, self.n_repeats)[k] for array in inputs)))
            for function in self.further_functions:
                function()
        return [Handle(value) for output in zip(*results, strict=True) for value in output]

    def get_repeated(self, n_repeats):
        return Launch(self.first, self.further_functions, n_repeats)


class ToyEngine(LazyEngine):
    """Runs functions when they are called, and hands out handles of their outputs."""

    #: Whether it runs functions rather than the default engine: tests set it before they fork.
    runs_functions = False

    def can_launch(self, library, mode):
        return self.runs_functions and not library.is_xla_mode(mode)

    def make_runner(self, library, function, n_inputs, allows_opaque_outputs):
        return Launch(function) if allows_opaque_outputs else Runner(function)

    def fuse_step(self, rank, gradient, exchange, updates, n_repeats):
        def all_reduce_shared():
            communicator, _ = exchange.prepare_exchange(rank)
            communicator.all_reduce(exchange.get_reduced_variable(rank).container.storage[0], exchange.op)

        return Launch(gradient.first, (all_reduce_shared, *(update.first for update in updates)), n_repeats)

    def get_max_repeats(self, dtype=None):
        return 8

    def fetch_outputs(self, values):
        return [value.value if isinstance(value, Handle) else value for value in values]


ENGINE = ToyEngine()
