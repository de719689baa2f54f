"""Random calls, collectives and faults, for seconds or hours; every result is compared with a serial model.

    python tests/support/soak.py --seconds 1200 --seed 0 --ranks 3

One seed determines calls, collectives and faults: exceptions in ranks at various moments, workers killed while idle, in
a call or in a collective, workers that stop and continue, interrupts, and forks of another number of ranks.  The model
keeps each rank's shared variables as NumPy arrays.  Where a fault leaves open whether an effect was applied, each
element has to be the old or the new one.  Calls and collectives are few and plain: tests with Hypothesis draw their
arguments.

The program ends with a summary, or with status 1 at the first wrong result, with the command that repeats the run, or
at the first hang, with the stacks of all threads.  Each step has a random generator of its own, so that a repeated run
has the same steps, although the moments of faults vary.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import functools
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE")
# Theano's compilers wait for each other: long runs need a base_compiledir of their own, or another program's long
# compilation is taken for a hang.
os.environ.setdefault("THEANO_FLAGS", "blas.ldflags=,mode=FAST_COMPILE")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2]), str(pathlib.Path(__file__).resolve().parent)]

import numpy as np
from library import NAME, Apply, Op, shared, tensor
from system import is_alive, list_children

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks import Command

#: Seconds after which a step counts as hung.
LIMIT = 60.0
#: Seconds within which a death must be noticed: two are documented, on an idle machine.
NOTICED = 5.0
#: Variables with larger values are replaced, so that products stay finite.
LARGEST = 1e3


# -- faults --------------------------------------------------------------------------------------------------


class InjectedError(Exception):
    """An error that a test raises on purpose."""


def _raise_injected_error() -> None:
    raise InjectedError("on purpose")


def _die_by(number: int) -> None:
    os.kill(os.getpid(), number)
    if number != signal.SIGSTOP:
        time.sleep(60)


#: Actions of a rank, by number, since an array carries the number.
ACTIONS: dict[int, Callable[[], None]] = {
    0: _raise_injected_error,
    1: functools.partial(_die_by, signal.SIGKILL),
    2: functools.partial(_die_by, signal.SIGSEGV),
    3: functools.partial(os._exit, 7),
    4: functools.partial(_die_by, signal.SIGSTOP),
    5: functools.partial(signal.raise_signal, signal.SIGINT),
}
RAISE, KILL, CRASH, EXIT, STOP, INTERRUPT = range(6)
DEATHS = {KILL: "SIGKILL", CRASH: "SIGSEGV", EXIT: "exited with code 7"}


class RunOrders(Op):
    """Op that returns its first argument; a process named in the second argument first runs its action."""

    __props__ = ()

    def make_node(self, x, orders):
        return Apply(self, [x, orders], [x.type()])

    def perform(self, node, inputs, outputs, *_):
        x, orders = inputs
        for pid, action in orders.tolist():
            if pid == os.getpid():
                ACTIONS[action]()
        outputs[0][0] = x.copy()


@dataclass(frozen=True)
class InjectAtBarrier(Command):
    """Command after which some ranks run an action at their k-th barrier or gather."""

    orders: tuple[tuple[int, int, int], ...]  # rank, k, action

    def run(self, rank):
        for number, k, action in self.orders:
            if number == rank.number:
                left = iter(range(k - 1, -1, -1))
                for name in ("barrier", "gather_bytes"):
                    setattr(rank, name, functools.partial(_count_down, left, action, getattr(rank, name)))


def _count_down(left: Any, action: int, call: Callable[..., Any], *args: Any) -> Any:
    if next(left, None) == 0:
        ACTIONS[action]()
    return call(*args)


@dataclass(frozen=True)
class RemoveInjections(Command):
    """Command that removes the actions of `InjectAtBarrier`."""

    def run(self, rank):
        for name in ("barrier", "gather_bytes"):
            rank.__dict__.pop(name, None)


@dataclass
class Faults:
    """Faults of one step.

    Attributes
    ----------
    kind : str
    orders : list of (rank, action)
        For functions that take orders.
    sabotage : tuple of (rank, k, action)
    outside : list of (seconds, rank, signal's number)
        Faults that a thread of the master causes during a step, in workers and in the master.
    """

    kind: str = "none"
    orders: list[tuple[int, int]] = field(default_factory=list)
    sabotage: tuple[tuple[int, int, int], ...] = ()
    outside: list[tuple[float, int, int]] = field(default_factory=list)

    def get_actions(self) -> dict[int, set[int]]:
        """Return the possible actions of each rank."""
        actions: dict[int, set[int]] = collections.defaultdict(set)
        for rank, action in [*self.orders, *((rank, action) for rank, _, action in self.sabotage)]:
            actions[rank].add(action)
        numbers = {signal.SIGKILL: KILL, signal.SIGSEGV: CRASH, signal.SIGSTOP: STOP, signal.SIGINT: INTERRUPT}
        for _, rank, number in self.outside:
            actions[rank].add(numbers[signal.Signals(number)])
        return actions


# -- the model -----------------------------------------------------------------------------------------------

UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def reduce_values(op: str | None, values: list[np.ndarray], weights: list[int]) -> Any:
    """Return the reduction of values, from the formulas in the documentation."""
    name = None if op is None else op.removeprefix("c_")
    if name is None:
        return values[-1]
    if name == "gather":
        return np.concatenate([np.atleast_1d(value) for value in values])
    if name == "mean":
        total = sum(np.asarray(v, np.float64) * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        return np.asarray(total, values[0].dtype)
    total = functools.reduce(UFUNCS[name], values)
    return np.asarray(total / len(values) if name == "avg" else total, values[0].dtype)


def find_close(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a mask of equal elements of two arrays, within their dtype's precision."""
    if a.dtype.kind not in "fc" or a.size == 0:
        return a == b
    epsilon = {"float16": 4e-3, "float32": 1e-5, "complex64": 1e-5}.get(a.dtype.name, 1e-10)
    finite = np.abs(b[np.isfinite(b)]).astype(np.float64)
    scale = max(1.0, float(finite.max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        return (np.abs(a - b) <= epsilon * (scale + np.abs(b))) | (a == b) | (np.isnan(a) & np.isnan(b))


class WrongResult(AssertionError):
    """A result that differs from the expected one."""


def expect(condition: Any, *words: Any) -> None:
    """Raise `WrongResult` with these words unless the condition holds."""
    if not condition:
        raise WrongResult(" ".join(map(str, words)))


def expect_equal(actual: Any, expected: Any, description: str) -> None:
    """Compare results: arrays, or lists of them; None equals None."""
    if isinstance(expected, list):
        expect(isinstance(actual, list) and len(actual) == len(expected), f"{description}: got {actual!r}")
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            expect_equal(a, b, f"{description}[{i}]")
    elif expected is None:
        expect(actual is None, f"{description}: {actual!r}, expected None")
    else:
        expect(isinstance(actual, np.ndarray), f"{description}: expected an array, got {actual!r}")
        expect(actual.shape == expected.shape, f"{description}: shape {actual.shape}, expected {expected.shape}")
        expect(actual.dtype == expected.dtype, f"{description}: {actual.dtype}, expected {expected.dtype}")
        expect(find_close(actual, expected).all(), f"{description}:\n{actual}\nexpected\n{expected}")


@dataclass(eq=False)
class Variable:
    """A shared variable, and its expected value on each rank; one that functions use keeps its shape."""

    shared: Any
    values: list[np.ndarray]
    has_fixed_shape: bool

    def __repr__(self) -> str:
        return f"{self.shared.name}:{self.values[0].dtype}{self.values[0].shape}"


@dataclass
class Step:
    """An operation, its expected outcome, and its changes of the variables.

    Attributes
    ----------
    description : str
    run : callable
        Runs the operation; returns the result.
    expected
        The result.
    new : dict of Variable to list of ndarray
        Values of the variables afterwards, one for each rank.
    is_refused : bool
        Whether ValueError is expected, after which no variable has changed.
    touches : list of Variable
        Variables to check after a fault.
    """

    description: str
    run: Callable[[], Any]
    expected: Any = None
    new: dict[Variable, list[np.ndarray]] = field(default_factory=dict)
    is_refused: bool = False
    touches: list[Variable] = field(default_factory=list)


# -- the soak ------------------------------------------------------------------------------------------------


def draw_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """Return small random multiples of 1/4, whose sums are exact, or small integers."""
    dtype = np.dtype(dtype)
    return np.asarray(rng.integers(-3, 4, shape) if dtype.kind == "i" else rng.integers(-8, 9, shape) / 4, dtype)


class TrainingFunction:
    """A function with random ops, whose updates change `w` and `c`; its last input orders faults."""

    def __init__(self, rng: np.random.Generator, w: Variable, c: Variable, name: str):
        x, b, orders = tensor.dmatrix("x"), tensor.dvector("b"), tensor.lmatrix("orders")
        ops = ["sum", "prod", "min", "max", None, "avg", "mean"]
        integer_ops = ops[:5]
        self.ops = [self._draw_op(rng, choices) for choices in (ops, [*ops, "gather"], integer_ops, ops, integer_ops)]
        self.w, self.c, self.data = w, c, None
        y = RunOrders()(x, orders)
        outputs = [y.sum(axis=0) + w.shared, y.sum(), c.shared + 1]
        new_values = [0.5 * w.shared + y.sum(axis=0) * b, c.shared + 1]
        self.function = synk.function(
            [x],
            list(zip(outputs, self.ops[:3], strict=True)),
            bcast_inputs=[b, orders],
            updates=list(zip([w.shared, c.shared], new_values, self.ops[3:], strict=True)),
            name=name,
        )

    @staticmethod
    def _draw_op(rng: np.random.Generator, choices: list[Any]) -> str | None:
        op = choices[rng.integers(len(choices))]
        return f"c_{op}" if op is not None and rng.random() < 0.3 else op

    def compute(self, rank: int, x: np.ndarray, b: np.ndarray, n_slices: int) -> list[np.ndarray]:
        """Return a rank's outputs and new values."""
        w, c = self.w.values[rank], self.c.values[rank]
        slices = np.array_split(x, min(n_slices, len(x)))
        results = [[s.sum(axis=0) + w, s.sum(), c + 1, 0.5 * w + s.sum(axis=0) * b, c + 1] for s in slices]
        columns = [list(map(np.asarray, column)) for column in zip(*results, strict=True)]
        if n_slices == 1:
            return [column[0] for column in columns]
        # The slices of an output are weighted by rows.
        ops = ["mean" if op in ("avg", "c_avg") and i < 3 else op for i, op in enumerate(self.ops)]
        return [reduce_values(op, column, list(map(len, slices))) for op, column in zip(ops, columns, strict=True)]


class Soak:
    """A run of random operations and faults, with the expected value of each variable."""

    def __init__(self, seed: int, max_ranks: int):
        self.seed, self.max_ranks = seed, max_ranks
        self.step, self.doing = 0, "setting up"
        self.size, self.root = 0, 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.slowest_death = 0.0
        self.is_interruptible = False
        signal.signal(signal.SIGINT, self._record_interrupt)
        self.rng = np.random.default_rng((seed, 0))
        self.w, self.c = self._make_variable("w", (4,)), self._make_variable("c", (), np.int64)
        self.variables = [self.w, self.c, self._make_variable("v_float32", (3, 4), np.float32)]
        self.variables += [self._make_variable("v_int64", (5,), np.int64)]
        self.variables += [self._make_variable("v_large", (500, 700))]  # several times the scratch memory
        self.functions: list[TrainingFunction] = []
        self.declarations: list[Any] = []
        self.fork(min(2, max_ranks), 0)

    def explain(self) -> str:
        return f"{self.doing} (step {self.step}, seed {self.seed}, ranks {self.max_ranks})"

    def _record_interrupt(self, *_: Any) -> None:
        if self.is_interruptible:
            raise KeyboardInterrupt

    def _make_variable(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> Variable:
        value = draw_values(self.rng, shape, dtype)
        return Variable(shared(value.copy(), name), [value], has_fixed_shape=len(name) == 1)

    # -- ranks -----------------------------------------------------------------------------------------------

    def fork(self, size: int, root: int) -> None:
        """Start ranks, and reset the model."""
        expect(list_children(os.getpid()) == [], f"children before the fork: {list_children(os.getpid())}")
        timeout = None if self.rng.random() < 0.7 else 0.9 * LIMIT
        expect(synk.fork(size, use_gpu=False, master_rank=root, timeout=timeout) == size, "fork's result")
        self._prepare_ranks(size, root)

    def _prepare_ranks(self, size: int, root: int) -> None:
        self.size, self.root = size, root
        for variable in self.variables:
            variable.values = [np.asarray(variable.shared.get_value())] * size
        # Collectives accept only variables that a function of these ranks uses.
        self.declarations = [synk.function([], [], updates=[(v.shared, v.shared)]) for v in self.variables]
        for function in self.functions:
            function.data = None

    def pids(self) -> dict[int, int]:
        """Return the process ID of each worker by rank."""
        return dict(ranks.get_session().worker_pids)

    def check_ended(self) -> None:
        """Check that closed ranks have left no process."""
        expect(list_children(os.getpid()) == [], f"children after the end: {list_children(os.getpid())}")
        try:
            ranks.get_session()
        except RuntimeError:
            return
        raise WrongResult("ranks are running, and should not be")

    # -- steps -----------------------------------------------------------------------------------------------

    def make_call_step(self, faults: Faults) -> Step:
        """Call a function, of which there are up to eight; some ranks may have no rows."""
        rng = self.rng
        if len(self.functions) < 8 or rng.random() < 0.1:
            del self.functions[7:]
            self.functions.append(TrainingFunction(rng, self.w, self.c, f"f_{self.step}"))
        f = self.functions[rng.integers(len(self.functions))]
        content = draw_values(rng, (int(rng.choice([1, 2, 3, 5, 8, 13, 40])), 4))
        x: Any = content
        if rng.random() < 0.5:
            if f.data is None:
                f.data = synk.data(content)
            else:
                f.data.set_value(content, oversize=float(rng.uniform(1, 2)))
            x = f.data
        selection = rng.integers(0, len(content), rng.integers(1, 2 * len(content) + 1))
        batch = selection if rng.random() < 0.5 else None
        parts = np.array_split(content if batch is None else content[selection], self.size)
        b, n_slices = draw_values(rng, (4,)), int(rng.choice([1, 1, 2, 5]))
        pids = {**self.pids(), self.root: os.getpid()}
        orders = np.array([(pids[r], action) for r, action in faults.orders], np.int64).reshape(-1, 2)
        active = [r for r in range(self.size) if len(parts[r])]
        by_rank = {r: f.compute(r, parts[r], b, n_slices) for r in active}
        weights = [len(parts[r]) for r in active]
        expected: list[Any] = []
        for i, op in enumerate(f.ops[:3]):
            values = [by_rank[r][i] for r in active]
            if op is None:
                expected.append(by_rank[self.root][i] if self.root in active else None)
            else:
                expected.append(reduce_values(op, values, weights))
        new = {v: list(v.values) for v in (self.w, self.c)}
        for r in active:
            new[self.w][r], new[self.c][r] = by_rank[r][3:]
        return Step(
            f"call {f.function.name} of {len(content)} rows, batch={batch!r}, num_slices={n_slices}",
            lambda: f.function(x, b, orders, batch=batch, num_slices=n_slices),
            expected,
            new,
            touches=[self.w, self.c],
        )

    def make_collective_step(self, faults: Faults) -> Step:
        """Make a collective of one or two variables."""
        rng = self.rng
        names = ["broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce", "set_value", "get_value"]
        name = names[rng.integers(len(names))]
        pool = self.variables
        if name in ("scatter", "all_gather", "set_value"):
            pool = [v for v in pool if not v.has_fixed_shape]
        picked = [pool[i] for i in rng.permutation(len(pool))[: rng.integers(1, 3)]]
        step = getattr(self, f"_make_{name}_step")(picked)
        step.description = f"{name} {picked} {step.description}"
        step.touches = picked
        return step

    def _draw_new_value(self, v: Variable, n_rows: int | None = None) -> np.ndarray:
        """Return a value for a variable, with another shape unless functions use it."""
        if v.has_fixed_shape:
            shape = v.values[0].shape
        elif v.shared.name == "v_large":
            shape = (300 + int(self.rng.integers(12)), 700)
        else:
            n_rows = int(self.rng.integers(0, 12)) if n_rows is None else n_rows
            shape = (n_rows, *self.rng.integers(1, 5, v.values[0].ndim - 1).tolist())
        return draw_values(self.rng, shape, v.values[0].dtype)

    def _make_broadcast_step(self, picked: list[Variable]) -> Step:
        shareds = [v.shared for v in picked]
        if self.rng.random() < 0.5:
            return Step("", lambda: synk.broadcast(shareds), new={v: [v.values[self.root]] * self.size for v in picked})
        values = [self._draw_new_value(v) for v in picked]
        new = {v: [value] * self.size for v, value in zip(picked, values, strict=True)}
        return Step(f"to {[v.shape for v in values]}", lambda: synk.broadcast(shareds, values), new=new)

    def _make_scatter_step(self, picked: list[Variable]) -> Step:
        shareds, values = [v.shared for v in picked], [self._draw_new_value(v) for v in picked]
        new = {v: np.array_split(value, self.size) for v, value in zip(picked, values, strict=True)}
        return Step(f"of {[v.shape for v in values]}", lambda: synk.scatter(shareds, values), new=new)

    def _make_gather_step(self, picked: list[Variable]) -> Step:
        shareds = [v.shared for v in picked]
        expected = [
            np.stack(v.values) if len({value.shape for value in v.values}) == 1 else list(v.values) for v in picked
        ]
        return Step("", lambda: synk.gather(shareds), expected)

    def _make_all_gather_step(self, picked: list[Variable]) -> Step:
        picked = [v for v in picked if sum(value.size for value in v.values) < 1_000_000] or [self.variables[2]]
        shareds = [v.shared for v in picked]
        if any(len({value.shape[1:] for value in v.values}) > 1 for v in picked):
            return Step("", lambda: synk.all_gather(shareds), is_refused=True)
        new = {v: [np.concatenate(v.values)] * self.size for v in picked}
        return Step("", lambda: synk.all_gather(shareds), new=new)

    def _reduce_variables(self, picked: list[Variable]) -> tuple[str, list[np.ndarray] | None]:
        """Return an op, and each variable's reduction; None if shapes differ."""
        ops = ["sum", "prod", "min", "max"] + ["avg"] * all(v.values[0].dtype.kind == "f" for v in picked)
        op = ops[self.rng.integers(len(ops))]
        if any(len({value.shape for value in v.values}) > 1 for v in picked):
            return op, None
        return op, [reduce_values(op, v.values, [1] * self.size) for v in picked]

    def _make_reduce_step(self, picked: list[Variable]) -> Step:
        op, results = self._reduce_variables(picked)
        shareds, in_place = [v.shared for v in picked], bool(self.rng.random() < 0.5)
        step = Step(f"{op} in_place={in_place}", lambda: synk.reduce(shareds, op, in_place=in_place))
        if results is None:
            step.is_refused = True
        elif in_place:
            step.new = {v: list(v.values) for v in picked}
            for v, result in zip(picked, results, strict=True):
                step.new[v][self.root] = result
        else:
            step.expected = results
        return step

    def _make_all_reduce_step(self, picked: list[Variable]) -> Step:
        op, results = self._reduce_variables(picked)
        step = Step(op, lambda: synk.all_reduce([v.shared for v in picked], op), is_refused=results is None)
        step.new = {v: [result] * self.size for v, result in zip(picked, results or [], strict=results is not None)}
        return step

    def _make_set_value_step(self, picked: list[Variable]) -> Step:
        r = int(self.rng.integers(self.size))
        shareds, values = [v.shared for v in picked], [self._draw_new_value(v) for v in picked]
        new = {v: list(v.values) for v in picked}
        for v, value in zip(picked, values, strict=True):
            new[v][r] = value
        return Step(f"of rank {r}", lambda: synk.set_value(r, shareds, values), new=new)

    def _make_get_value_step(self, picked: list[Variable]) -> Step:
        r = int(self.rng.integers(self.size))
        return Step(
            f"of rank {r}", lambda: synk.get_value(r, [v.shared for v in picked]), [v.values[r] for v in picked]
        )

    # -- running them ----------------------------------------------------------------------------------------

    def _choose_faults(self) -> Faults:
        rng, n = self.rng, self.size
        if rng.random() < 0.75:
            return Faults()
        workers = [r for r in range(n) if r != self.root]
        target_rank = int(rng.choice(workers)) if workers else self.root
        death, k, delay = int(rng.choice(list(DEATHS))), int(rng.integers(1, 6)), float(rng.exponential(0.003))
        failing_ranks = rng.permutation(n)[: rng.integers(1, n + 1)].tolist()
        deadly_signal = int(rng.choice([signal.SIGKILL, signal.SIGSEGV]))
        choices = [
            Faults("raise here", orders=[(self.root, RAISE)]),
            Faults("interrupt", outside=[(delay, self.root, signal.SIGINT)]),
            Faults("interrupt here", orders=[(self.root, INTERRUPT)]),
            Faults("interrupt at a barrier", sabotage=((self.root, k, INTERRUPT),)),
        ]
        if workers:
            choices += [
                Faults("raise", orders=[(target_rank, RAISE)]),
                Faults("raise several", orders=[(r, RAISE) for r in failing_ranks]),
                Faults("raise at a barrier", sabotage=tuple((r, k, RAISE) for r in failing_ranks)),
                Faults("kill", orders=[(target_rank, death)]),
                Faults("kill at a barrier", sabotage=((target_rank, k, death),)),
                Faults("kill outside", outside=[(delay, target_rank, signal.SIGKILL)]),
                Faults("kill idle", outside=[(0.0, target_rank, deadly_signal)]),
                Faults("stop", orders=[(target_rank, STOP)]),
                Faults("stop at a barrier", sabotage=((target_rank, k, STOP),)),
                Faults("stop outside", outside=[(delay, target_rank, signal.SIGSTOP)]),
            ]
        return choices[rng.integers(len(choices))]

    def take_step(self) -> None:
        """Draw a step and a fault, run the step, and check its outcome."""
        self.step += 1
        self.rng = np.random.default_rng((self.seed, self.step))
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if self.rng.random() < 0.02:
            self._change_ranks()
        else:
            faults = self._choose_faults()
            is_call = faults.orders or self.rng.random() < 0.5
            step = self.make_call_step(faults) if is_call else self.make_collective_step(faults)
            self.doing = f"{step.description} fault {faults}"
            self.counts[step.description.split(" ")[0]] += 1
            self.faults[faults.kind] += faults.kind != "none"
            self._run_step(step, faults)
        faulthandler.cancel_dump_traceback_later()

    def _change_ranks(self) -> None:
        """Close and fork, sometimes with an interrupt."""
        rng = self.rng
        self.doing = "close and fork"
        self.counts["fork"] += 1
        size = int(rng.integers(1, self.max_ranks + 2))
        root = int(rng.integers(size))
        if rng.random() < 0.3:
            self.faults["interrupt in close"] += 1
            with self._interrupt_after(float(rng.exponential(0.003))), contextlib.suppress(KeyboardInterrupt):
                synk.close()
        synk.close()
        self.check_ended()
        self.check_master()
        if rng.random() < 0.3:
            self.faults["interrupt in fork"] += 1
            try:
                with self._interrupt_after(float(rng.exponential(0.01))):
                    synk.fork(size, use_gpu=False, master_rank=root)
            except KeyboardInterrupt:
                synk.close()  # the interrupt may have arrived after the fork
                self.check_ended()
            else:
                self._prepare_ranks(size, root)
                return
        self.fork(size, root)

    @contextlib.contextmanager
    def _interrupt_after(self, seconds: float) -> Any:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))  # any thread may receive it
        timer.start()
        try:
            self.is_interruptible = True
            yield
        finally:
            self.is_interruptible = False
            timer.join()

    def check_master(self) -> None:
        """Check the master's copies, which remain after the ranks have ended."""
        for v in self.variables:
            expect_equal(np.asarray(v.shared.get_value()), v.values[self.root], f"{v.shared.name} in the master")

    def _run_step(self, step: Step, faults: Faults) -> None:
        session, before = ranks.get_session(), self.pids()
        may = faults.get_actions()
        if faults.sabotage:
            session.run(InjectAtBarrier(faults.sabotage))
        if faults.kind == "kill idle":
            for _, r, number in faults.outside:
                os.kill(before[r], number)
            time.sleep(float(self.rng.choice([0.0, 0.01])))
        is_over, signalled = (
            threading.Event(),
            {r for _, r, _ in faults.outside} if faults.kind == "kill idle" else set(),
        )
        threads = [
            threading.Thread(target=self._send_signal_later, args=(before, event, is_over, signalled))
            for event in ([] if faults.kind == "kill idle" else faults.outside)
        ]
        stopped = [r for r, get_actions in may.items() if STOP in get_actions]
        threads += [threading.Thread(target=self._continue_process, args=(before[r], is_over)) for r in stopped]
        for thread in threads:
            thread.start()
        compiled, start, error, result = self._count_compiled(), time.monotonic(), None, None
        try:
            try:
                self.is_interruptible = True
                result = step.run()
            finally:
                self.is_interruptible = False
        except (WrongResult, AssertionError):
            raise
        except BaseException as caught:
            error = caught
        # The master notices no death while it compiles itself.
        duration = time.monotonic() - start if self._count_compiled() == compiled else 0.0
        is_over.set()
        for thread in threads:
            thread.join()
        self._check_outcome(step, faults, may, error, result, duration, before, signalled)

    def _count_compiled(self) -> int:
        return sum(len(f.function._computation.compiled_variants) for f in self.functions)

    @staticmethod
    def _send_signal_later(
        pids: dict[int, int], event: tuple[float, int, int], is_over: threading.Event, signalled: set[int]
    ) -> None:
        seconds, r, number = event
        is_over.wait(seconds)
        if is_over.is_set():
            return
        if r in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[r], number)
                signalled.add(r)
        else:
            os.kill(os.getpid(), number)  # any thread may receive it

    @staticmethod
    def _continue_process(pid: int, is_over: threading.Event) -> None:
        while True:
            ended = is_over.wait(0.1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            if ended:
                return

    def _check_outcome(
        self,
        step: Step,
        faults: Faults,
        may: dict[int, set[int]],
        error: BaseException | None,
        result: Any,
        duration: float,
        before: dict[int, int],
        signalled: set[int],
    ) -> None:
        """Check that the faults allow this outcome, and check every variable."""
        session_ended = ranks.current_session._current.close_reason is not None
        died = isinstance(error, synk.WorkerError) and session_ended
        mortal = {r: actions & set(DEATHS) for r, actions in may.items() if actions & set(DEATHS)}
        outcome = "right" if error is None else "dead" if died else type(error).__name__
        if isinstance(error, InjectedError):
            expect(
                RAISE in may.get(self.root, ()),
                "an error from nowhere:",
                error,
            )
        elif isinstance(error, KeyboardInterrupt):
            expect(INTERRUPT in may.get(self.root, ()), "an interrupt from nowhere")
        elif died:
            expect(error.rank in mortal, f"rank {error.rank} died, and nobody told it to:", error)
            words = [DEATHS[action] for action in mortal[error.rank]]
            expect(any(word in str(error) for word in words), f"expected {words} in:", error)
            self.slowest_death = max(self.slowest_death, duration)
            expect(duration < NOTICED, f"a death was noticed after {duration:.1f} s")
        elif isinstance(error, synk.WorkerError):
            expect(RAISE in may.get(error.rank, ()), "a worker's error from nowhere:", error)
            expect("Injected" in error.worker_traceback, "no traceback in", error)
            expect(all(RAISE in may.get(r, ()) for r in error.failures), f"{error.failures}, told were {may}")
        elif error is not None:
            if not step.is_refused or not isinstance(error, ValueError):
                raise WrongResult(f"an error from nowhere: {error!r}") from error
            outcome = "refused"
        elif step.is_refused:
            raise WrongResult(f"not refused: {step.description}")
        else:
            expect_equal(result, step.expected, "result")
        self.outcomes[outcome] += 1

        if died:
            self._recover(step)
            return
        if faults.sabotage:
            ranks.get_session().run(RemoveInjections())
        for r in mortal:
            if r in signalled:  # at the end of the step
                self._expect_death(r, before[r])
                self._recover(step, applied=error is None)
                return
        if error is None:
            for variable, values in step.new.items():
                variable.values = list(values)
            if faults.kind != "none" or (step.new and self.rng.random() < 0.3):
                self._check_variables(list(step.new), None)
        elif outcome == "refused":
            self._check_variables(step.touches, None)
        else:
            self._check_variables(list(dict.fromkeys([*step.new, *step.touches])), step)
            self._check_reported_updates(step, error)
        self._bound_values(step)

    def _expect_death(self, r: int, pid: int) -> None:
        """Run a command after a worker was killed, once the kernel has ended it."""
        while is_alive(pid):
            time.sleep(0.001)
        start = time.monotonic()
        try:
            synk.get_shapes(self.w.shared)
        except synk.WorkerError as error:
            expect(error.rank == r, f"rank {r} was killed, but the error says:", error)
            expect(time.monotonic() - start < NOTICED, "a death was noticed late")
            self.outcomes["dead when idle"] += 1
        else:
            raise WrongResult(f"rank {r} is dead, and nobody noticed")

    def _recover(self, step: Step, applied: bool | None = None) -> None:
        """Fork after a death; the master's variables have their old or new values."""
        self.check_ended()
        for v in self.variables:
            actual, old = np.asarray(v.shared.get_value()), v.values[self.root]
            new = step.new[v][self.root] if v in step.new else old
            self._expect_one_of(actual, [new] if applied else [old, new], f"{v.shared.name} in the master")
            v.values = [actual] * self.size
        size = int(self.rng.integers(1, self.max_ranks + 2))
        self.fork(size, int(self.rng.integers(size)))

    @staticmethod
    def _expect_one_of(actual: np.ndarray, candidates: list[np.ndarray], description: str) -> None:
        """Check that each element equals that of one of the candidates, such as the old or the new array."""
        agree = [find_close(actual, candidate) for candidate in candidates if candidate.shape == actual.shape]
        text = "\nor\n".join(map(str, candidates))
        expect(agree and functools.reduce(np.logical_or, agree).all(), f"{description}:\n{actual}\nshould be\n{text}")

    def _check_variables(self, variables: list[Variable], failed: Step | None) -> None:
        """Compare variables on all ranks with the model, and update the model to their values."""
        for v in variables:
            if self.rng.random() < 0.5:
                values = [np.asarray(synk.get_value(r, v.shared)) for r in range(self.size)]
            else:
                values = [np.asarray(value) for value in synk.gather(v.shared)]
            for r, actual in enumerate(values):
                old = v.values[r]
                if failed is None:
                    expect_equal(actual, old, f"{v.shared.name} on rank {r}")
                    continue
                candidates = [old, failed.new[v][r] if v in failed.new else old]
                self._expect_one_of(actual, candidates, f"{v.shared.name} on rank {r}, after a fault")
            expect_equal(np.asarray(v.shared.get_value()), values[self.root], f"{v.shared.name}, by its own get_value")
            v.values = values

    def _check_reported_updates(self, step: Step, error: BaseException) -> None:
        """Check the updates that the error of a call reports as applied."""
        if not step.description.startswith("call") or not step.new or isinstance(error, KeyboardInterrupt):
            return
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        expect("updates were applied on" in text, "nothing says what was applied:", text)

    def _bound_values(self, step: Step) -> None:
        """Replace large values, so that products stay finite."""
        for v in step.new:
            if v.values[0].dtype.kind == "f" and not max(np.abs(x).max(initial=0.0) for x in v.values) < LARGEST:
                value = draw_values(self.rng, v.values[0].shape, v.values[0].dtype)
                synk.broadcast(v.shared, value)
                v.values = [value] * self.size

    # -- all of it -------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Take steps until the time is over, and print the summary."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            self.take_step()
        synk.close()
        self.check_ended()
        duration = time.monotonic() - start
        print(
            f"soak of {NAME}: seed {self.seed}, {self.step} steps in {duration:.0f} s ({self.step / duration:.1f} a second)"
        )
        for title, counter in (("steps", self.counts), ("faults", self.faults), ("outcomes", self.outcomes)):
            print(f"  {title}: " + ", ".join(f"{name} {n}" for name, n in counter.most_common() if n))
        print(f"  slowest notice of a death: {self.slowest_death:.2f} s")
        print("  0 wrong results, 0 hangs", flush=True)


def main() -> int:
    """Run a soak for some seconds; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=3, help="usual number of ranks; one more at most")
    args = parser.parse_args()
    soak = None
    try:
        soak = Soak(args.seed, args.ranks)
        soak.run(args.seconds)
    except BaseException:
        traceback.print_exc()
        if soak is not None:
            print(f"\nWRONG: {soak.explain()}", file=sys.stderr)
        command = f"python tests/support/soak.py --seconds {args.seconds:g} --seed {args.seed} --ranks {args.ranks}"
        print(f"To repeat: {command}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
