"""Random use and random faults, for seconds or hours; every result is compared with a serial model.

    python tests/support/soak.py --seconds 1200 --seed 0 --ranks 3

One seed determines functions, calls, collectives, Data objects that grow and are freed, and faults: exceptions in ranks
at various moments, workers killed while idle, in a call or in a collective, workers that stop and continue, interrupts,
and forks of another number of ranks.  The model keeps each rank's shared variables as NumPy arrays, and computes the
expected results with NumPy.  Where a fault leaves open whether an effect was applied, each element has to be the old or
the new one.

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
from library import NAME, shared, tensor
from system import is_alive, list_children

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks import Command
from synkhronos.replication.replicator import Replicator

if NAME == "pytensor":
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
else:
    from theano.gof import Apply, Op

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
    """Compare results: arrays, None, or lists of them."""
    if isinstance(expected, list | tuple):
        expect(isinstance(actual, list | tuple), f"{description}: expected {len(expected)} values, got {actual!r}")
        expect(len(actual) == len(expected), f"{description}: {len(actual)} values, expected {len(expected)}")
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            expect_equal(a, b, f"{description}[{i}]")
        return
    if expected is None or not isinstance(expected, np.ndarray):
        expect(
            type(actual) is type(expected) and actual == expected, f"{description}: {actual!r}, expected {expected!r}"
        )
        return
    expect(isinstance(actual, np.ndarray), f"{description}: expected an array, got {actual!r}")
    expect(actual.shape == expected.shape, f"{description}: shape {actual.shape}, expected {expected.shape}")
    expect(actual.dtype == expected.dtype, f"{description}: {actual.dtype}, expected {expected.dtype}")
    expect(find_close(actual, expected).all(), f"{description}:\n{actual}\nexpected\n{expected}")


class Variable:
    """A shared variable, and its expected value on each rank.

    Attributes
    ----------
    shared
    values : list of ndarray
        One a rank.
    sent : bool
        Whether the workers have it: from then on their copies are their own.
    """

    def __init__(self, name: str, value: np.ndarray, fixed: bool = False):
        self.shared = shared(value.copy(), name)
        self.name, self.dtype, self.ndim, self.fixed = name, value.dtype, value.ndim, fixed
        self.values = [value]
        self.sent = False

    def __repr__(self) -> str:
        return f"{self.name}:{self.dtype}{self.values[0].shape}"


@dataclass(eq=False)
class FunctionModel:
    """A function, and its model in NumPy.

    Attributes
    ----------
    kind : str
    make : callable
        Returns a new `synkhronos.Function`.
    ops : list
        Ops of the outputs.
    updates : list of (Variable, op)
    compute : callable
        Maps a rank's rows, the broadcast inputs and the variables to outputs and new values.
    dtype, n_columns
        Dtype and width of the scattered input, if there is one.
    whole : list of shape
        Shapes of the broadcast inputs.
    takes_orders : bool
        Whether the last broadcast input has orders.
    sliceable : Variable or None
    function
        The present function.
    """

    kind: str
    make: Callable[[], Any]
    ops: list[Any]
    updates: list[tuple[Variable, Any]]
    compute: Callable[..., tuple[list[Any], list[Any]]]
    dtype: Any = None
    n_columns: int = 0
    whole: list[tuple[int, ...]] = field(default_factory=list)
    takes_orders: bool = False
    sliceable: Variable | None = None
    reads: list[Variable] = field(default_factory=list)
    function: Any = None
    data: Any = None
    content: Any = None

    def variables(self) -> list[Variable]:
        variables = [*self.reads, *(v for v, _ in self.updates)]
        return list(dict.fromkeys([*variables, self.sliceable] if self.sliceable is not None else variables))


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
    refused : exception class or tuple, optional
        Expected error, after which no variable has changed.
    touches : list of Variable
        Variables that this step sends to the workers.
    check : bool
        Whether the result is compared.
    """

    description: str
    run: Callable[[], Any]
    expected: Any = None
    new: dict[Variable, list[np.ndarray]] = field(default_factory=dict)
    refused: Any = None
    touches: list[Variable] = field(default_factory=list)
    check: bool = True


# -- the soak ------------------------------------------------------------------------------------------------


def draw_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """Return small random multiples of 1/4, whose sums are exact."""
    dtype = np.dtype(dtype)
    if dtype == bool:
        return np.asarray(rng.integers(0, 2, shape), bool)
    if dtype.kind in "iu":
        return np.asarray(rng.integers(0 if dtype.kind == "u" else -3, 4, shape), dtype)
    values = rng.integers(-8, 9, shape) / 4
    return np.asarray(values + 1j * rng.integers(-8, 9, shape) / 4 if dtype.kind == "c" else values, dtype)


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
        self.interruptible = False
        signal.signal(signal.SIGINT, self._record_interrupt)
        self.rng = np.random.default_rng((seed, 0))
        self.variables = self._make_variables()
        self.models: list[FunctionModel] = []
        self.declarations: list[Any] = []
        self.fork(min(2, max_ranks), 0)
        for _ in range(8):
            self.models.append(self._draw_function())

    def explain(self) -> str:
        return f"{self.doing} (step {self.step}, seed {self.seed}, ranks {self.max_ranks})"

    def _record_interrupt(self, *_: Any) -> None:
        if self.interruptible or self.step < 0:
            raise KeyboardInterrupt

    # -- setting up ------------------------------------------------------------------------------------------

    def _make_variables(self) -> list[Variable]:
        rng, variables = self.rng, []
        dtypes = "float64 float32 float16 int8 uint8 int32 int64 bool complex64 complex128".split()
        for i, dtype in enumerate(dtypes):
            shape = tuple(rng.integers(1, 5, i % 4).tolist())
            variables.append(Variable(f"v_{dtype}", draw_values(rng, shape, dtype)))
        variables.append(Variable("v_large", draw_values(rng, (500, 700))))  # several times the scratch memory
        variables.append(Variable("v_large32", draw_values(rng, (100_003,), np.float32)))
        # Variables of functions keep their shapes, except for the rows of the sliceable one.
        self.w = Variable("w", draw_values(rng, (4,)), fixed=True)
        self.c = Variable("c", draw_values(rng, (), np.int64), fixed=True)
        self.t = Variable("t", draw_values(rng, (3,)), fixed=True)
        self.s = Variable("s", draw_values(rng, (9, 3)), fixed=True)
        return [*variables, self.w, self.c, self.t, self.s]

    def _draw_function(self) -> FunctionModel:
        kind = str(self.rng.choice(["plain", "plain", "update", "update", "update", "sliceable", "both"]))
        model = getattr(self, f"_make_{kind}_function")()
        model.function = model.make()
        return model

    def _draw_op(self, integer: bool = False, gather: bool = False) -> str | None:
        names: list[Any] = ["sum", "prod", "min", "max", None] + ([] if integer else ["avg", "mean"]) * 2
        op = self.rng.choice(names + ["gather"] * (3 if gather else 0))
        return f"c_{op}" if op is not None and self.rng.random() < 0.3 else op

    def _make_plain_function(self) -> FunctionModel:
        rng = self.rng
        dtype = str(rng.choice(["float64", "float32", "int64"]))
        integer, n_columns = dtype == "int64", int(rng.choice([1, 4, 60]))
        x, b = tensor.matrix("x", dtype=dtype), tensor.vector("b", dtype=dtype)
        outer = 400 if rng.random() < 0.3 else 3
        choices = {
            "columns": (x.sum(axis=0), lambda x, b: x.sum(axis=0), False),
            "total": (x.sum(), lambda x, b: x.sum(), True),
            "rows": (x * 2, lambda x, b: x * 2, None),
            "outer": (tensor.outer(x.sum(axis=0), b), lambda x, b: np.outer(x.sum(axis=0), b), False),
            "whole": (b.sum(), lambda x, b: b.sum(), True),
        }
        picked = [choices[str(name)] for name in rng.choice(list(choices), rng.integers(1, 4))]
        ops = ["gather" if gather is None else self._draw_op(integer, bool(gather)) for _, _, gather in picked]

        def compute(rows, whole, state):
            return [np.asarray(evaluate(rows[0], whole[0]), dtype) for _, evaluate, _ in picked], []

        outputs = [(graph, op) for (graph, _, _), op in zip(picked, ops, strict=True)]
        name = f"plain_{self.step}"

        def make():
            return synk.function([x], outputs, bcast_inputs=[b], name=name, on_unused_input="ignore")

        return FunctionModel("plain", make, ops, [], compute, dtype, n_columns, [(outer,)])

    def _make_update_function(self) -> FunctionModel:
        x, b, orders = tensor.dmatrix("x"), tensor.dvector("b"), tensor.lmatrix("orders")
        x_after_orders = RunOrders()(x, orders)
        w, c = self.w, self.c
        ops = [self._draw_op(), self._draw_op(gather=True), self._draw_op(integer=True)]
        update_ops = [self._draw_op(), self.rng.choice(["sum", "prod", "min", "max", None, "avg"])]
        outputs = list(
            zip([x_after_orders.sum(axis=0) + w.shared, x_after_orders.sum(), c.shared + 1], ops, strict=True)
        )
        updates = [
            (w.shared, 0.5 * w.shared + x_after_orders.sum(axis=0) * b, update_ops[0]),
            (c.shared, c.shared + 1, update_ops[1]),
        ]

        def compute(rows, whole, state):
            (x,), b = rows, whole[0]
            sums = x.sum(axis=0)
            return [sums + state[w], np.asarray(x.sum()), state[c] + 1], [0.5 * state[w] + sums * b, state[c] + 1]

        name = f"update_{self.step}"

        def make():
            return synk.function([x], outputs, bcast_inputs=[b, orders], updates=updates, name=name)

        pairs = list(zip([w, c], update_ops, strict=True))
        return FunctionModel("update", make, ops, pairs, compute, "float64", 4, [(4,)], takes_orders=True)

    def _make_sliceable_function(self) -> FunctionModel:
        s, t = self.s, self.t
        ops = [self._draw_op(), "gather", self._draw_op(gather=True)]
        update_op = self._draw_op()
        graph = s.shared
        outputs = list(zip([graph.sum(axis=0) + t.shared, graph * 2, graph.sum()], ops, strict=True))
        updates = [(t.shared, 0.5 * t.shared + graph.sum(axis=0), update_op)]

        def compute(rows, whole, state):
            sums = state[s].sum(axis=0)
            return [sums + state[t], state[s] * 2, np.asarray(state[s].sum())], [0.5 * state[t] + sums]

        name = f"sliceable_{self.step}"

        def make():
            return synk.function([], outputs, updates=updates, sliceable_shareds=[s.shared], name=name)

        return FunctionModel("sliceable", make, ops, [(t, update_op)], compute, sliceable=s)

    def _make_both_function(self) -> FunctionModel:
        s, w = self.s, self.w
        x = tensor.dmatrix("x")
        ops = [self._draw_op(), self._draw_op(), "gather"]
        outputs = list(zip([x.sum(axis=0) * s.shared.sum(), s.shared.sum(axis=0), x + w.shared], ops, strict=True))

        def compute(rows, whole, state):
            (x,) = rows
            return [x.sum(axis=0) * state[s].sum(), state[s].sum(axis=0), x + state[w]], []

        name = f"both_{self.step}"

        def make():
            return synk.function([x], outputs, sliceable_shareds=[s.shared], name=name)

        return FunctionModel("both", make, ops, [], compute, "float64", 4, sliceable=s, reads=[w])

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
            value = np.asarray(variable.shared.get_value())
            variable.values, variable.sent = [value] * size, False
        # Collectives accept only variables that a function of these ranks uses.
        self.declarations = [synk.function([], [], updates=[(v.shared, v.shared)]) for v in self.variables]
        for model in self.models:
            model.data = model.content = None
            if self.rng.random() < 0.3:
                model.function = model.make()

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

    def _draw_batch(self, length: int) -> tuple[Any, np.ndarray]:
        """Return a batch, and the equivalent row numbers."""
        rng, all_rows = self.rng, np.arange(length)
        kind = rng.integers(0, 8)
        if kind <= 1:
            return None, all_rows
        if kind == 2:
            batch: Any = int(rng.integers(0, length + 1))
            return batch, all_rows[:batch]
        if kind == 3:
            batch = slice(*sorted(rng.integers(0, length + 1, 2).tolist()), int(rng.integers(1, 4)))
        elif kind == 4:
            batch = slice(None, None, -int(rng.integers(1, 4)))
        elif kind == 5:
            batch = rng.integers(0, 2, length).astype(bool)
        else:
            low = -length if kind == 6 else 0
            batch = rng.integers(low, length, rng.integers(0, 2 * length + 1)) if length else np.empty(0, np.int64)
            return (batch.tolist() if rng.random() < 0.5 else batch), all_rows[batch]
        return batch, all_rows[batch]

    def _draw_input(self, model: FunctionModel) -> tuple[Any, np.ndarray]:
        """Return a scattered input, which is an array or a reused Data object, and its content."""
        rng = self.rng
        rows = int(rng.choice([0, 1, 2, 3, 5, 8, 13, 40]))
        value = draw_values(rng, (rows, model.n_columns), model.dtype)
        choice = rng.random()
        if choice < 0.3:
            return value, value
        if model.data is None or choice < 0.4:
            model.data = synk.data(value, oversize=float(rng.uniform(1, 2)))
            model.content = value
        elif choice < 0.6:
            model.data.set_value(value, oversize=float(rng.uniform(1, 2)))
            model.content = value
        return model.data, model.content

    def make_call_step(self, faults: Faults) -> Step:
        rng = self.rng
        eligible = [r for r in self.models if r.takes_orders] if faults.orders else self.models
        model = eligible[rng.integers(len(eligible))]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        words = [model.function.name]
        parts: list[np.ndarray] | None = None
        refused = None
        if model.dtype is not None:
            x, content = self._draw_input(model)
            batch, selection = self._draw_batch(len(content))
            if isinstance(x, synk.Data) and rng.random() < 0.2 and 0 < len(selection) <= len(content):
                # Row k of a minibatch goes with the k-th index.
                x.minibatch = True
                batch = (selection + int(rng.integers(0, 1000))).tolist()
                selection = np.arange(len(selection))
            elif isinstance(x, synk.Data):
                x.minibatch = False
            args.append(x)
            if batch is not None:
                kwargs["batch"] = batch
            parts = [content[index] for index in np.array_split(selection, self.size)]
            words.append(f"{len(content)} rows, batch={batch!r}")
        whole = [draw_values(rng, shape, model.dtype or np.float64) for shape in model.whole]
        args += [synk.data(value) if rng.random() < 0.2 else value for value in whole]
        if model.takes_orders:
            pids = {**self.pids(), self.root: os.getpid()}
            orders = [(pids[r], action) for r, action in faults.orders]
            args.append(np.array(orders, np.int64).reshape(-1, 2))
        slices = int(rng.integers(2, 6)) if rng.random() < 0.4 else 1
        if slices > 1:
            kwargs["num_slices"] = slices
            if any(op in ("avg", "c_avg", "mean", "c_mean") and v.dtype.kind == "i" for v, op in model.updates):
                refused = ValueError
        chosen: list[np.ndarray] | None = None
        if model.sliceable is not None:
            chosen = [np.arange(len(value)) for value in model.sliceable.values]
            if rng.random() < 0.6:
                kwargs["batch_s"], chosen = self._draw_batch_s(chosen)
        subset = None
        if rng.random() < 0.15:
            subset = rng.permutation(len(model.ops))[: rng.integers(1, len(model.ops) + 1)].tolist()
            kwargs["output_subset"] = subset
        words.append(" ".join(f"{key}={value!r}" for key, value in kwargs.items() if key != "batch"))
        expected, new, empty = self._compute_expected(model, parts, whole, chosen, slices)
        if empty and model.dtype is None:
            return self.make_collective_step(faults)  # no rank has rows
        expected = expected if subset is None else [expected[i] for i in subset]
        step = Step(
            "call " + ", ".join(words), lambda: model.function(*args, **kwargs), expected, new, refused,
            model.variables(),
        )  # fmt: skip
        if empty:  # without rows an op returns the same as the serial library, scalars included
            step.run = lambda: [None if v is None else np.reshape(v, e.shape) for v, e in
                                zip(model.function(*args, **kwargs), expected, strict=True)]  # fmt: skip
        if faults.get_actions():
            step.description += f" fault {faults}"
        return step

    def _draw_batch_s(self, rows_by_rank: list[np.ndarray]) -> tuple[Any, list[np.ndarray]]:
        rng, shortest = self.rng, min(map(len, rows_by_rank))
        if rng.random() < 0.3:
            selection: Any = slice(*sorted(rng.integers(0, shortest + 3, 2).tolist()))
            return selection, [rows[selection] for rows in rows_by_rank]
        if rng.random() < 0.3 and shortest:
            selection = rng.integers(0, shortest, rng.integers(1, 7)).tolist()
            return selection, [rows[selection] for rows in rows_by_rank]
        selections: list[Any] = []
        for rows in rows_by_rank:
            if rng.random() < 0.5 or not len(rows):
                selections.append(slice(*sorted(rng.integers(0, len(rows) + 1, 2).tolist()), int(rng.integers(1, 3))))
            else:
                selections.append(rng.integers(-len(rows), len(rows), rng.integers(1, 7)).tolist())
        return selections, [rows[selection] for rows, selection in zip(rows_by_rank, selections, strict=True)]

    def _compute_expected(
        self,
        model: FunctionModel,
        parts: list[np.ndarray] | None,
        whole: list[np.ndarray],
        chosen: list[np.ndarray] | None,
        slices: int,
    ) -> tuple[list[Any], dict[Variable, list[np.ndarray]], bool]:
        """Return the expected results and new values, and whether there are no rows."""
        n, root = self.size, self.root
        weights = [len(part) for part in parts] if parts is not None else [len(index) for index in chosen or []]
        active = [r for r in range(n) if weights[r]]
        empty = not active
        new = {v: list(v.values) for v, _ in model.updates}
        outputs = {}
        for r in [root] if empty else active:
            outputs[r], updated = self._compute_on_rank(model, r, parts, whole, chosen, slices)
            for (variable, _), value in zip(model.updates, [] if empty else updated, strict=not empty):
                new[variable][r] = value
        if empty:
            return outputs[root], new, True
        results: list[Any] = []
        for i, op in enumerate(model.ops):
            if op is None:
                results.append(outputs[root][i] if root in outputs else None)
            else:
                results.append(reduce_values(op, [outputs[r][i] for r in active], [weights[r] for r in active]))
        return results, new, False

    def _compute_on_rank(
        self,
        model: FunctionModel,
        r: int,
        parts: list[np.ndarray] | None,
        whole: list[np.ndarray],
        chosen: list[np.ndarray] | None,
        slices: int,
    ) -> tuple[list[Any], list[Any]]:
        state = {v: v.values[r] for v in model.variables()}
        rows = None if parts is None else parts[r]
        index = None if chosen is None else chosen[r]
        lengths = [len(array) for array in (rows, index) if array is not None]
        count = max(1, min(slices, *lengths)) if slices > 1 else 1
        results, weights = [], []
        for piece in range(count):
            rank_rows = [] if rows is None else [np.array_split(rows, count)[piece]]
            if model.sliceable is not None and index is not None:
                state[model.sliceable] = model.sliceable.values[r][np.array_split(index, count)[piece]]
            outputs, updated = model.compute(rank_rows, whole, state)
            results.append([np.asarray(value) for value in (*outputs, *updated)])
            weights.append(max(1, len(rank_rows[0]) if rank_rows else len(np.array_split(index, count)[piece])))
        if slices == 1:
            rank_outputs = results[0]
        else:
            ops = [*model.ops, *(op for _, op in model.updates)]
            ops = [
                "sum" if op in ("avg", "mean") and results[0][i].dtype.kind == "i" else op for i, op in enumerate(ops)
            ]
            rank_outputs = [reduce_values(op, [result[i] for result in results], weights) for i, op in enumerate(ops)]
        return rank_outputs[: len(model.ops)], rank_outputs[len(model.ops) :]

    def make_collective_step(self, faults: Faults) -> Step:
        rng = self.rng
        name = str(
            rng.choice("broadcast scatter gather all_gather reduce all_reduce set_value get_value shapes".split())
        )
        count = 1 if rng.random() < 0.6 else int(rng.integers(2, 4))
        pool = self.variables
        if name in ("scatter", "all_gather", "set_value"):
            pool = [v for v in pool if not v.fixed or v is self.s]
        picked = [pool[i] for i in rng.permutation(len(pool))[:count]]
        single = count == 1 and rng.random() < 0.8
        step = getattr(self, f"_{name}_step")(picked, single)
        step.description = f"{name} {picked} {step.description} fault {faults}"
        step.touches = picked if step.refused is None else []
        return step

    def _draw_shape(self, variable: Variable, rows: int | None = None) -> tuple[int, ...]:
        """Return a random shape for a variable; those that functions use keep theirs, but for rows."""
        if variable.ndim == 0 or (variable.fixed and variable is not self.s):
            return variable.values[0].shape
        length = int(self.rng.integers(0, 12)) if rows is None else rows
        if variable is self.s:
            return (length, 3)
        if variable.name.startswith("v_large") and self.rng.random() < 0.5:
            return (length + 300, 700) if variable.ndim == 2 else (length + 100_000,)
        return (length, *self.rng.integers(1, 5, variable.ndim - 1).tolist())

    def _draw_value(self, variable: Variable, shape: tuple[int, ...]) -> tuple[Any, np.ndarray]:
        value = draw_values(self.rng, shape, variable.dtype)
        return (synk.data(value) if self.rng.random() < 0.4 else value), value

    def _broadcast_step(self, picked: list[Variable], single: bool) -> Step:
        shareds = [v.shared for v in picked]
        if self.rng.random() < 0.5:
            new = {v: [v.values[self.root]] * self.size for v in picked}
            return Step("", lambda: synk.broadcast(shareds[0] if single else shareds), None, new)
        pairs = [self._draw_value(v, self._draw_shape(v)) for v in picked]
        values = [value for value, _ in pairs]
        new = {v: [value] * self.size for v, (_, value) in zip(picked, pairs, strict=True)}
        return Step(
            f"to {[v.shape for _, v in pairs]}",
            lambda: synk.broadcast(shareds[0], values[0]) if single else synk.broadcast(shareds, values),
            None,
            new,
        )

    def _scatter_step(self, picked: list[Variable], single: bool) -> Step:
        shareds = [v.shared for v in picked]
        if any(v.ndim == 0 for v in picked):
            return Step(
                "", lambda: synk.scatter(shareds, [np.zeros(())] * len(picked)), refused=(ValueError, TypeError)
            )
        rows = int(self.rng.integers(0, 20))
        pairs = [self._draw_value(v, self._draw_shape(v, rows)) for v in picked]
        batch, _ = self._draw_batch(min(len(value) for _, value in pairs))
        if any(len(value) != rows for _, value in pairs):
            batch = None
        selections = [np.arange(len(v)) if batch is None else self._to_index(batch, len(v)) for _, v in pairs]
        new = {
            v: [value[index] for index in np.array_split(selection, self.size)]
            for v, (_, value), selection in zip(picked, pairs, selections, strict=True)
        }
        values = [value for value, _ in pairs]
        return Step(
            f"of {[v.shape for _, v in pairs]} batch={batch!r}",
            lambda: (
                synk.scatter(shareds[0], values[0], batch) if single else synk.scatter(shareds, values, batch=batch)
            ),
            None,
            new,
        )

    @staticmethod
    def _to_index(batch: Any, length: int) -> np.ndarray:
        rows_by_rank = np.arange(length)
        if isinstance(batch, int):
            return rows_by_rank[:batch]
        return rows_by_rank[batch if isinstance(batch, slice) else np.asarray(batch, bool if len(batch) and
                          isinstance(batch[0], bool | np.bool_) else np.int64)]  # fmt: skip

    def _gather_step(self, picked: list[Variable], single: bool) -> Step:
        nd_up = int(self.rng.integers(0, 2))
        expected = []
        for v in picked:
            shapes = {value.shape for value in v.values}
            if nd_up and len(shapes) == 1:
                expected.append(np.stack(v.values))
            elif not nd_up and v.ndim and len({shape[1:] for shape in shapes}) == 1:
                expected.append(np.concatenate(v.values))
            else:
                expected.append(list(v.values))
        shareds = [v.shared for v in picked]
        if single:
            return Step(f"nd_up={nd_up}", lambda: synk.gather(shareds[0], nd_up=nd_up), expected[0])
        return Step(f"nd_up={nd_up}", lambda: synk.gather(shareds, nd_up), expected)

    def _all_gather_step(self, picked: list[Variable], single: bool) -> Step:
        shareds = [v.shared for v in picked]
        if any(v.ndim == 0 or len({value.shape[1:] for value in v.values}) > 1 for v in picked):
            return Step("", lambda: synk.all_gather(shareds), refused=ValueError)
        picked = [v for v in picked if sum(value.size for value in v.values) < 1_000_000]
        if not picked:
            return self._gather_step([self.w], True)
        new = {v: [np.concatenate(v.values)] * self.size for v in picked}
        shareds = [v.shared for v in picked]
        return Step("", lambda: synk.all_gather(shareds), None, new)

    def _reduction(self, picked: list[Variable], op: str) -> Any:
        """Return each variable's reduction, or the error that refuses it."""
        if any(op == "avg" and v.dtype.kind in "biu" or op == "sum" and v.dtype.kind == "b" for v in picked):
            return None
        if any(len({value.shape for value in v.values}) > 1 for v in picked):
            return None
        with np.errstate(all="ignore"):
            return [reduce_values(op, v.values, [1] * self.size) for v in picked]

    def _reduce_step(self, picked: list[Variable], single: bool) -> Step:
        op, in_place = str(self.rng.choice(list(UFUNCS))), bool(self.rng.random() < 0.5)
        shareds = [v.shared for v in picked]
        arg = shareds[0] if single else shareds

        def run():
            return synk.reduce(arg, op, in_place=in_place)

        results = self._reduction(picked, op)
        if results is None:
            return Step(op, run, refused=ValueError)
        if not in_place:
            return Step(op, run, results[0] if single else results)
        new = {v: [*v.values] for v in picked}
        for v, result in zip(picked, results, strict=True):
            new[v][self.root] = result
        return Step(f"{op} in place", run, None, new)

    def _all_reduce_step(self, picked: list[Variable], single: bool) -> Step:
        op = str(self.rng.choice(list(UFUNCS)))
        shareds = [v.shared for v in picked]
        results = self._reduction(picked, op)

        def run():
            synk.all_reduce(shareds[0] if single else shareds, op=op)

        if results is None:
            return Step(op, run, refused=ValueError)
        return Step(op, run, None, {v: [result] * self.size for v, result in zip(picked, results, strict=True)})

    def _set_value_step(self, picked: list[Variable], single: bool) -> Step:
        r = int(self.rng.integers(self.size))
        pairs = [self._draw_value(v, self._draw_shape(v)) for v in picked]
        new = {v: [*v.values] for v in picked}
        for v, (_, value) in zip(picked, pairs, strict=True):
            new[v][r] = value
        values, shareds = [value for value, _ in pairs], [v.shared for v in picked]
        if single:
            return Step(f"of rank {r}", lambda: synk.set_value(r, shareds[0], values[0]), None, new)
        return Step(f"of rank {r}", lambda: synk.set_value(r, shareds, values), None, new)

    def _get_value_step(self, picked: list[Variable], single: bool) -> Step:
        r = int(self.rng.integers(self.size))
        expected, shareds = [v.values[r] for v in picked], [v.shared for v in picked]
        if single:
            return Step(f"of rank {r}", lambda: synk.get_value(r, shareds[0]), expected[0])
        return Step(f"of rank {r}", lambda: synk.get_value(r, shareds), expected)

    def _shapes_step(self, picked: list[Variable], single: bool) -> Step:
        shareds = [v.shared for v in picked]
        shapes = [[value.shape for value in v.values] for v in picked]
        if any(v.ndim == 0 for v in picked):
            return Step("", lambda: synk.get_shapes(shareds), shapes)
        lengths = [[shape[0] for shape in variable_shapes] for variable_shapes in shapes]
        if single:
            return Step("", lambda: synk.get_lengths(shareds[0]), lengths[0])
        return Step("", lambda: synk.get_lengths(shareds), lengths)

    def make_data_step(self, faults: Faults) -> Step:
        """Grow, shrink, write, free a model's Data."""
        rng = self.rng
        model = [r for r in self.models if r.dtype is not None][0]
        if model.data is None:
            model.content = draw_values(rng, (5, model.n_columns), model.dtype)
            model.data = synk.data(model.content, name="x")
        d, old = model.data, model.content
        kind = str(rng.choice(["set_value", "set_length", "set_shape", "write", "free", "refused"]))
        rows = int(rng.choice([0, 1, 7, 50, 5000]))
        oversize = float(rng.uniform(1, 2))
        value = draw_values(rng, (rows, model.n_columns), model.dtype)

        def run():
            if kind == "set_value":
                d.set_value(value, oversize=oversize)
                model.content = value
            elif kind in ("set_length", "set_shape"):
                d.set_length(rows, oversize) if kind == "set_length" else d.set_shape(value.shape, oversize)
                model.content = np.zeros_like(value)
                model.content[: len(old)] = old[:rows]
            elif kind == "write" and len(old):
                model.content = old.copy()
                model.content[::2] = d[::2] = 1
            elif kind == "refused":
                for bad in (lambda: d.set_value([[1j]]), lambda: d.set_length(-1), lambda: d.set_shape((1, 2, 3))):
                    with contextlib.suppress(TypeError, ValueError):
                        bad()
                        raise WrongResult("a bad argument was taken")
            elif kind == "free":
                d.free_memory()
                expect(d.size == 0 and d.alloc_size == 0, "memory was not freed")
                model.data = model.content = None
                return
            expect_equal(np.array(model.data), model.content, f"Data after {kind}")

        return Step(f"data {kind} {rows}", run)

    def make_function_step(self, faults: Faults) -> Step:
        """Make, drop, distribute, or call in the master alone."""
        rng = self.rng
        kind = rng.integers(0, 4)
        if kind == 0 or len(self.models) > 12:

            def replace():
                self.models[rng.integers(len(self.models))] = self._draw_function()

            return Step("a new function for an old one", replace)
        if kind == 1:
            new = [v for r in self.models for v in r.variables()]
            return Step("distribute", synk.distribute, touches=list(dict.fromkeys([*self.variables, *new])))
        if kind == 2:
            variable = [self.w, self.t, self.variables[0]][rng.integers(3)]
            value = draw_values(rng, variable.values[self.root].shape, variable.dtype)
            values = [value if r == self.root or not variable.sent else v for r, v in enumerate(variable.values)]
            return Step(f"set {variable.name} in the master", lambda: variable.shared.set_value(value), None,
                        {variable: values}, check=False)  # fmt: skip
        model = next((r for r in self.models if r.kind == "plain"), None)
        if model is None:
            return self.make_data_step(faults)
        rows = draw_values(rng, (6, model.n_columns), model.dtype)
        whole = draw_values(rng, model.whole[0], model.dtype)
        return Step("as_theano", lambda: [np.asarray(v) for v in model.function.as_theano(rows, whole)],
                    model.compute([rows], [whole], {})[0])  # fmt: skip

    # -- running them ----------------------------------------------------------------------------------------

    def _choose_faults(self) -> Faults:
        rng, n = self.rng, self.size
        workers = [r for r in range(n) if r != self.root]
        if rng.random() < 0.75:
            return Faults()
        choices = ["raise here", "interrupt", "interrupt here"]
        if workers:
            choices += [
                "raise",
                "raise",
                "raise several",
                "raise at a barrier",
                "kill",
                "kill at a barrier",
                "kill outside",
            ]
            choices += ["kill idle", "stop", "stop outside", "stop at a barrier"]
        kind = str(rng.choice(choices))
        target_rank = int(rng.choice(workers)) if workers else self.root
        k = int(rng.integers(1, 6))
        death = int(rng.choice(list(DEATHS)))
        if kind == "raise here":
            return Faults(kind, orders=[(self.root, RAISE)])
        if kind == "interrupt":
            return Faults(kind, outside=[(float(rng.exponential(0.003)), self.root, signal.SIGINT)])
        if kind == "interrupt here":
            if rng.random() < 0.5:
                return Faults(kind, orders=[(self.root, INTERRUPT)])
            return Faults(kind, sabotage=((self.root, k, INTERRUPT),))
        if kind == "raise":
            return Faults(kind, orders=[(target_rank, RAISE)])
        if kind == "raise several":
            failing_ranks = rng.permutation(n)[: rng.integers(2, n + 1)].tolist()
            return Faults(kind, orders=[(r, RAISE) for r in failing_ranks])
        if kind == "raise at a barrier":
            return Faults(
                kind, sabotage=tuple((int(r), k, RAISE) for r in rng.permutation(n)[: rng.integers(1, n + 1)])
            )
        if kind == "kill":
            return Faults(kind, orders=[(target_rank, death)])
        if kind == "kill at a barrier":
            return Faults(kind, sabotage=((target_rank, k, death),))
        if kind == "kill outside":
            return Faults(kind, outside=[(float(rng.exponential(0.003)), target_rank, signal.SIGKILL)])
        if kind == "kill idle":
            return Faults(kind, outside=[(0.0, target_rank, int(rng.choice([signal.SIGKILL, signal.SIGSEGV])))])
        if kind == "stop":
            return Faults(kind, orders=[(target_rank, STOP)])
        if kind == "stop at a barrier":
            return Faults(kind, sabotage=((target_rank, k, STOP),))
        return Faults(kind, outside=[(float(rng.exponential(0.003)), target_rank, signal.SIGSTOP)])

    def take_step(self) -> None:
        """Draw a step and a fault, run the step, and check its outcome."""
        self.step += 1
        self.rng = np.random.default_rng((self.seed, self.step))
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        self.doing = "choosing"
        choice = self.rng.random()
        if choice < 0.02:
            self._change_ranks()
        else:
            faults = self._choose_faults()
            if faults.orders and any(r.takes_orders for r in self.models):
                step = self.make_call_step(faults)
            elif choice < 0.52:
                step = self.make_call_step(Faults() if faults.orders else faults)
                faults = Faults() if faults.orders else faults
            elif choice < 0.84:
                step, faults = self.make_collective_step(faults), Faults() if faults.orders else faults
            elif choice < 0.92:
                step, faults = self.make_data_step(faults), Faults()
            else:
                step, faults = self.make_function_step(faults), Faults()
            self.doing = step.description
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
            self.interruptible = True
            yield
        finally:
            self.interruptible = False
            timer.join()

    def check_master(self) -> None:
        """Check the master's copies, which remain after the ranks have ended."""
        for v in self.variables:
            expect_equal(np.asarray(v.shared.get_value()), v.values[self.root], f"{v.name} in the master")

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
                self.interruptible = True
                result = step.run()
            finally:
                self.interruptible = False
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
        return sum(len(model.function._computation.compiled) for model in self.models)

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
        mortal = {r: get_actions & set(DEATHS) for r, get_actions in may.items() if get_actions & set(DEATHS)}
        outcome = "right" if error is None else "dead" if died else type(error).__name__
        if isinstance(error, InjectedError):
            expect(
                any(RAISE in get_actions for r, get_actions in may.items() if r == self.root),
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
            if step.refused is None or not isinstance(error, step.refused):
                raise WrongResult(f"an error from nowhere: {error!r}") from error
            outcome = "refused"
        elif step.refused is not None:
            raise WrongResult(f"not refused: {step.description}")
        else:
            expect_equal(result, step.expected, "result")
        self.outcomes[outcome] += 1

        for variable in step.touches:
            variable.sent |= error is None
        if outcome == "refused":  # by the ranks, perhaps, once they had seen each other's shapes
            for variable in self.variables:
                variable.sent |= Replicator.from_session(ranks.get_session()).get_key(variable.shared) is not None
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
            if faults.kind != "none" or (step.new and step.check and self.rng.random() < 0.3):
                self._check_variables(list(step.new), None)
        elif outcome == "refused":
            self._check_variables(step.touches[:2], None)
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
            self._expect_one_of(actual, [new] if applied else [old, new], f"{v.name} in the master")
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
            first_sent, v.sent = not v.sent, True
            for r, actual in enumerate(values):
                old = v.values[r]
                if failed is None:
                    expect_equal(actual, old, f"{v.name} on rank {r}")
                    continue
                candidates = [old, failed.new[v][r] if v in failed.new else old]
                if first_sent:  # perhaps only now: copies of the master's values
                    candidates.append(values[self.root])
                self._expect_one_of(actual, candidates, f"{v.name} on rank {r}, after a fault")
            expect_equal(np.asarray(v.shared.get_value()), values[self.root], f"{v.name}, by its own get_value")
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
            sizes = [np.abs(value.astype(np.complex128)).max(initial=0.0) for value in v.values]
            if v.dtype.kind in "fc" and not max(sizes) < (100 if v.dtype == np.float16 else LARGEST):
                value = draw_values(self.rng, v.values[0].shape, v.dtype)
                synk.broadcast(v.shared, value)
                v.values, v.sent = [value] * self.size, True

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
