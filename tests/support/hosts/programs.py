"""Programs that run on the first of several hosts: ``programs.py NAME`` runs one, on the hosts that HOSTS names.

``programs.py serve`` runs many, on the same ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from typing import Any
from unittest import mock

import numpy as np
import pytest
import rank_programs
from library import compute_digest, shared, tensor
from system import list_children

import synkhronos as synk
from hosts import slow_down_agents
from synkhronos import ranks
from synkhronos.data_objects.data_access import create_unpublished
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.devices.multi_host_communicator import get_numpy_communicator
from synkhronos.hosts import mpirun
from synkhronos.ranks.mailbox import Mailbox
from synkhronos.training import make_train_function, make_train_function_serial, updates
from synkhronos.training.trainer.death_recovery import RecoveryPolicy

HOSTS = os.environ.get("HOSTS", "").split(",")  # Open MPI's mpirun does not pass it on to ranks on other hosts


@cache
def fork() -> int:
    """Start ranks unless they run: on several hosts, or with one host on this machine only."""
    if len(HOSTS) == 1:
        return synk.fork(int(HOSTS[0].partition(":")[2]), use_gpu=False)
    return synk.fork(hosts=HOSTS, use_gpu=False)


def train_network() -> None:
    """Train a small network for 30 steps on rows by index, and write into its data in between."""
    n = fork()
    rng = np.random.default_rng(0)
    x, y = tensor.fmatrix("x"), tensor.fvector("y")
    weights = [
        shared((rng.normal(size=size) / 8).astype("float32"), f"w{i}")
        for i, size in enumerate([(20, 100), (100, 300), (300,)])
    ]
    out = x
    for w in weights[:2]:
        out = tensor.tanh(tensor.dot(out, w))
    loss = tensor.log1p(tensor.exp((1 - 2 * y) * tensor.dot(out, weights[2]))).mean()
    # Python's linker computes this rule by arrays, but Adam's product of three factors number by number.
    step = make_train_function(loss, weights, x, y, updates.rmsprop, learning_rate=np.float32(0.001))
    points = rng.normal(size=(1001, 20)).astype("float32")
    labels = (np.sin(points @ rng.normal(size=20)) > 0).astype("float32")
    x_data, y_data = synk.data(points), synk.data(labels)
    order, losses = rng.permutation(len(points)), []
    for k in range(30):
        losses.append(step(x_data, y_data, batch=order[(k * 130) % 900 :][:101]))
        np.asarray(x_data)[order[k]] *= 1.5  # without a message to the ranks
    copies = [np.asarray(synk.get_value(r, weights[1])) for r in range(n)]
    assert all(np.array_equal(copy, copies[0]) for copy in copies)
    print(compute_digest(*(w.get_value() for w in weights), *losses))


def set_values(s: Any, values: list[np.ndarray]) -> None:
    """Set a different value on each rank."""
    for r, value in enumerate(values):
        synk.set_value(r, s, value)


def run_collectives() -> None:
    """Run all collectives, and print digests of the results."""
    n = fork()
    rng = np.random.default_rng(1)
    for dtype in ("float64", "float32", "float16", "int64"):
        for size in (1, 1000, 2_500_001 if dtype == "float64" else 700_001):  # more than the capacity of a pipe
            values = [
                rng.normal(size=size).astype(dtype) if dtype != "int64" else rng.integers(-9, 9, size) for _ in range(n)
            ]
            s = shared(values[0].copy(), "s")
            synk.function([], [], updates=[(s, s)])
            synk.distribute()
            for op in ("sum", "avg", "max") if dtype != "int64" else ("sum", "min"):
                set_values(s, values)
                synk.all_reduce(s, op)
                results = synk.gather(s, nd_up=1)
                assert all(np.array_equal(result, results[0]) for result in results)
                print(dtype, size, op, compute_digest(results[0]))
            set_values(s, values)
            gathered = synk.gather(s, nd_up=1)
            assert all(np.array_equal(gathered[r], values[r]) for r in range(n))
            synk.reduce(s, "prod")
            print("reduce", compute_digest(s.get_value()))
            set_values(s, values)
            synk.reduce_scatter(s, "sum")
            print("reduce_scatter", synk.get_lengths(s), compute_digest(synk.gather(s, nd_up=0)))
            set_values(s, values)
            synk.broadcast(s)
            results = synk.gather(s, nd_up=1)
            assert all(np.array_equal(result, values[0]) for result in results)
    parts = synk.data(np.arange(30.0).reshape(10, 3))
    t = shared(np.zeros((1, 3)), "t")
    synk.function([], t.sum())
    synk.distribute()
    synk.scatter(t, parts)
    assert np.array_equal(synk.gather(t, nd_up=0), np.asarray(parts)), synk.gather(t)
    print(synk.get_lengths(t))
    empty = shared(np.zeros((0, 3)), "empty")
    synk.function([], empty.sum())
    synk.distribute()
    for _ in range(2):
        synk.all_reduce(empty)
    assert synk.get_shapes(empty) == [(0, 3)] * n


@dataclass(frozen=True)
class InterruptAllReduce(ranks.Command):
    """Command after which the master is interrupted once it has a part of a result, which the workers receive later."""

    is_on: bool

    def run(self, rank: ranks.Rank) -> None:
        """Replace a method of the rank's communicator, or restore it."""
        communicator: Any = get_numpy_communicator(rank)
        vars(communicator).pop("_finish_chunk", None)
        finish_chunk = communicator._finish_chunk

        def finish_and_interrupt(*arguments: Any) -> None:
            if not rank.is_master:
                time.sleep(0.1)
            finish_chunk(*arguments)
            if rank.is_master:
                signal.raise_signal(signal.SIGINT)

        if self.is_on:
            communicator._finish_chunk = finish_and_interrupt


def interrupt_all_reduce() -> None:
    """Interrupt an all-reduce while the workers wait for its result, and repeat it."""
    from hosts import programs  # the others find the command by its name

    n, session = fork(), ranks.get_session()
    s = shared(np.ones(3), "s")
    synk.function([], [], updates=[(s, s)])
    synk.distribute()
    for is_on in (True, False):
        set_values(s, [np.full(3, float(r)) for r in range(n)])
        session.run(programs.InterruptAllReduce(is_on))
        with pytest.raises(KeyboardInterrupt) if is_on else contextlib.nullcontext():
            synk.all_reduce(s, "sum")
        assert np.array_equal(synk.gather(s), np.full((n, 3), sum(range(n)))), synk.gather(s)
    print("passed")


def call_functions() -> None:
    """Call functions of all kinds, and compare the results with NumPy's."""
    fork()
    x, i = tensor.dmatrix("x"), tensor.lvector("i")
    f = synk.function([x], [(x.sum(axis=0), "sum"), (x * 2, "gather"), (x.mean(), "avg")])
    g = synk.function([x, i], (x[:, 0] + i, "gather"))
    rng = np.random.default_rng(2)
    data, index = synk.data(rng.normal(size=(5000, 7))), synk.data(np.arange(5000))
    for batch in (None, 100, slice(10, 4000, 3), slice(4000, 10, -7), rng.permutation(5000)[:777], [3, 3, 1]):
        values = np.asarray(data)
        chosen = values[: batch or None] if batch is None or isinstance(batch, int) else values[batch]
        total, double, _ = f(data, batch=batch)
        np.testing.assert_allclose(total, chosen.sum(axis=0))
        np.testing.assert_array_equal(double, 2 * chosen)
        np.testing.assert_array_equal(
            g(data, index, batch=batch),
            (values[:, 0] + np.arange(5000))[: batch or None]
            if batch is None or isinstance(batch, int)
            else (values[:, 0] + np.arange(5000))[batch],
        )
        data[rng.integers(5000)] = rng.normal(size=7)
    data.set_length(6000)
    assert f(data)[1].shape == (6000, 7)
    sent = ranks.get_session().bytes_sent if len(HOSTS) > 1 else 0
    f(data)
    if len(HOSTS) > 1:
        assert ranks.get_session().bytes_sent == sent  # nothing has changed
    data.free_memory()
    try:
        f(np.ones((4, 7)), batch=[9])
    except IndexError:
        print("passed")


def map_files(path: str, other: str) -> None:
    """Map a file on all hosts; then a file that is missing on all but the first."""
    fork()
    x = tensor.dmatrix("x")
    f = synk.function([x], (x * 2, "gather"))
    value = np.random.default_rng(3).normal(size=(3000, 11))
    np.save(path, value)
    data = synk.data_file(path)
    before = synk.bytes_sent()
    np.testing.assert_array_equal(f(data, batch=np.arange(2999, 0, -3)), 2 * value[2999:0:-3])
    np.testing.assert_array_equal(f(data), 2 * value)
    assert synk.bytes_sent() - before < 100_000  # the function, and the indexes
    np.save(other, value)
    try:
        f(synk.data_file(other))
    except synk.WorkerError as error:
        assert re.search("host [bc]", str(error)) and "No such file" in str(error), error
        print("error names the host")


def load_triples(start: int, stop: int) -> np.ndarray:
    """Load rows of three numbers."""
    return np.arange(3.0 * start, 3.0 * stop).reshape(-1, 3)


def check_error(error: type[Exception], words: str, call: Any) -> None:
    """Check that a call raises an error with these words."""
    try:
        call()
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(words)


def use_local_parts() -> None:
    """Load rows on each host, compute on them, and index rows of other hosts."""
    n = fork()
    n_local_ranks, is_alone = int(HOSTS[0].partition(":")[2]), len(HOSTS) == 1
    x = tensor.dmatrix("x")
    f = synk.function([x], [(x * 2, "gather"), (x.sum(), "sum")])
    s = shared(np.zeros((1, 3)), "s")
    g = synk.function([], s.sum())
    f(synk.data(load_triples(0, n)))
    g()
    for length in [*range(1, 3 * n), 1001]:
        data, whole = synk.data_parts(lambda start, stop: load_triples(start, stop), length), load_triples(0, length)
        before = synk.bytes_sent()
        double, total = f(data)
        np.testing.assert_array_equal(double, 2 * whole)
        assert total == whole.sum() and (data.local_rows == range(length)) == (is_alone or length <= n_local_ranks)
        np.testing.assert_array_equal(data[data.local_rows.start : data.local_rows.stop], whole[: len(data.local_rows)])
        if length >= n:
            values = []
            for batch in data.batches(n, seed=(1, length)):
                np.testing.assert_array_equal(f(data, batch=batch)[0], 2 * whole[batch])
                values.extend(batch.tolist())
            assert len(set(values)) == len(values)
            synk.scatter(s, data)
            np.testing.assert_array_equal(synk.gather(s, nd_up=0), whole)
        assert synk.bytes_sent() - before < 4096 * (2 + length)  # the indexes
    last = np.arange(1000, 600, -1)
    if is_alone:
        np.testing.assert_array_equal(f(data, batch=last)[0], 2 * whole[last])
        np.testing.assert_array_equal(data, whole)
    else:
        message = f"has those from 0 to {data.local_rows.stop - 1}"
        for batch in (last, slice(600, 1000), slice(1000, 600, -1)):
            check_error(IndexError, message, lambda batch=batch: f(data, batch=batch))
        check_error(IndexError, message, lambda: synk.broadcast(s, data))
        check_error(IndexError, "this host has rows 0 to", lambda: data[-1])
        check_error(IndexError, "others have the rest", lambda: np.asarray(data))

        def load(start: int, stop: int) -> np.ndarray:
            if stop == 1001:
                raise OSError("the disk is on fire")
            return load_triples(start, stop)

        start = 1001 - 1001 // n
        words = f"rank {n - 1} on host b raised RuntimeError: load({start}, 1001), for rank {n - 1}: OSError: the disk"
        check_error(synk.WorkerError, words, lambda: synk.data_parts(load, 1001))
    np.testing.assert_array_equal(f(data)[0], 2 * whole)
    print("passed")


def use_local_rows(context: synk.RankContext, rows: Any, f: Any) -> Any:
    """Compute on rows of this host, and request others."""
    local_rows, errors = rows.local_rows, []
    for call in (lambda: rows[[local_rows.start, local_rows.stop % len(rows)]], lambda: rows.array, lambda: f(rows)):
        try:
            call()
        except IndexError as error:
            errors.append(str(error))
    return local_rows, f(rows[local_rows.start : local_rows.stop][1:]), errors


def pass_parts_to_programs() -> None:
    """Pass rows that each host has loaded to programs of ranks."""
    n = fork()
    from hosts import programs

    x = tensor.dmatrix("x")
    f = synk.function([x], x.sum())
    data, whole = synk.data_parts(lambda start, stop: load_triples(start, stop), 101), load_triples(0, 101)
    f(synk.data(whole))
    before = synk.bytes_sent()
    results = synk.run(programs.use_local_rows, data, f)
    assert synk.bytes_sent() - before < 4096
    for ranks_of_host in ranks.get_session().ranks_by_host:
        for r in ranks_of_host:
            local_rows, total, errors = results[r]
            assert float(total) == whole[local_rows.start + 1 : local_rows.stop].sum()
            if len(HOSTS) == 1:
                assert local_rows == range(101) and not errors
            else:
                words = f"rank {r}'s host has {local_rows.start} to {local_rows.stop - 1} (rows.local_rows)"
                assert len(errors) == 3 and all(words in error for error in errors), errors
    assert sum(len(results[host_ranks[0]][0]) for host_ranks in ranks.get_session().ranks_by_host) == 101
    print("passed", n)


def train_on_parts(counts: str) -> None:
    """Train on rows that each host has loaded, from a checkpoint within an epoch too; print digests.

    On one host, its ranks are treated as those of several hosts, with these counts.  On hosts of different
    sizes only two rules are run, since rules do not depend on hosts.
    """
    import tempfile

    from trainer_model import ALL, SYNCHRONOUS, Model, X, Y

    from synkhronos.training import CheckpointError, CheckpointFolder

    n, sizes, length = fork(), list(map(int, counts.split("+"))), 59
    ranks_by_host = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    patch = mock.patch.object(ranks.get_session()._group.link, "ranks_by_host", ranks_by_host)
    with patch if len(HOSTS) == 1 else contextlib.nullcontext():
        assert ranks.get_session().ranks_by_host == ranks_by_host
        host_rows = [
            range(length)[
                get_share_slice(length, n, host_ranks[0]).start : get_share_slice(length, n, host_ranks[-1]).stop
            ]
            for host_ranks in ranks_by_host
        ]
        arrays = [X, Y, np.arange(length)]
        x, *y = [synk.data_parts(lambda start, stop, array=array: array[start:stop], length) for array in arrays]
        for name in ALL if sizes[0] == sizes[1] else ["BSP", "EASGD"]:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                model = Model(name)
                before = synk.bytes_sent()
                keep = {"valid": (x, y), "every": 3, "checkpoints": CheckpointFolder(folder, keep=9)}
                reports = list(model.trainer.epochs(x, y, 3, 2, **keep))
                assert [report.rows_seen for report in reports] == [36, 48, 84, 96]
                used = np.asarray(synk.gather(model.counts, nd_up=1))[:, :length]
                for rows, host_ranks in zip(host_rows, ranks_by_host, strict=True):  # of this host only
                    assert used[host_ranks].sum() == 2 * 12 * len(host_ranks) == used[host_ranks][:, rows].sum(), (
                        name,
                        used,
                    )
                assert set(used.sum(axis=0).tolist()) <= {0.0, 1.0, 2.0}, name
                mse = np.mean((X[:length] @ model.w.get_value() + model.b.get_value() - Y[:length]) ** 2)
                np.testing.assert_allclose(reports[-1].validation["mse"], mse, err_msg=name)
                if name not in SYNCHRONOUS:
                    continue
                again = Model(name)
                within = CheckpointFolder(folder).list_paths()[2]
                resumed_reports = list(again.trainer.epochs(x, y, 3, 2, valid=(x, y), resume=within))
                assert np.array_equal(again.values(), model.values()), name
                numbers = [(r.loss, r.validation["mse"]) for r in [*reports, *resumed_reports]]
                print(name, compute_digest(model.values(), numbers))
                check_error(
                    CheckpointError,
                    f"within an epoch over data_parts, of {sizes} ranks on the hosts and 3 rows",
                    lambda again=again, within=within: list(again.trainer.epochs(x, y, 2, 2, resume=within)),
                )
            if len(HOSTS) > 1:  # functions, indexes, and the rules' memory, but not the rows
                print(name, "sent", synk.bytes_sent() - before, file=sys.stderr)


def measure_parts_memory() -> None:
    """Load 32 MB, and print the memory that this rank allocates for it."""
    fork()
    with mock.patch.object(os, "posix_fallocate", wraps=os.posix_fallocate) as allocate:
        data = synk.data_parts(lambda start, stop: np.zeros((stop - start, 1 << 10)), 1 << 12)
    print(sum(call.args[2] for call in allocate.call_args_list))
    data.free_memory()


def communicate(context: synk.RankContext) -> Any:
    """Exchange numbers in pairs, in groups and among all ranks."""
    n, me = context.size, context.number
    for k in range(20):
        for is_sender in (me % 2 == 0, me % 2 == 1):
            if is_sender:
                context.send((me, k), (me + 1) % n)
                context.send(np.full(30_000, me + k), (me + 1) % n)
            else:
                source, turn = context.receive((me - 1) % n)
                array = context.receive((me - 1) % n)
                assert (source, turn) == ((me - 1) % n, k) and (array == source + k).all()
    others = [r for r in range(n) if r != me]
    for r in others:  # fits into the buffer of `send`
        for k in range(5):
            context.send(np.full(25_000, me + k, "u1"), r)
    for r in others:
        assert all((context.receive(r) == r + k).all() for k in range(5))
    context.barrier("half way")
    assert context.all_gather(me) == list(range(n))
    total = context.all_reduce(np.arange(300_000.0) + me, "sum")
    assert (total == n * np.arange(300_000.0) + n * (n - 1) / 2).all()
    group = context.group([r for r in range(n) if r % 2 == me % 2])
    sums = group.all_reduce(np.full(5, float(me)), "sum")
    return me, sums[0]


def return_value(context: synk.RankContext, value: Any) -> Any:
    """Return the argument."""
    return value


def all_reduce_often(context: synk.RankContext) -> bool:
    """All-reduce small arrays, more often than a pipe has frames."""
    return all(context.all_reduce(np.full(3, k), "sum")[0] == context.size * k for k in range(100))


def run_rank_programs() -> None:
    """Run a program on each rank."""
    n = fork()
    from hosts import programs  # other ranks import it by its name

    def print_sums() -> None:
        print(*(f"{r}: {total:g}" for r, total in synk.run(programs.communicate)), sep=", ")

    large = np.arange(300_000)  # longer than the mailbox
    assert all(np.array_equal(received, large) for received in synk.run(programs.return_value, large))
    for nbytes in range(261_500, 262_200, 50):  # about the size of the mailbox
        assert synk.run(programs.return_value, b"x" * nbytes) == [b"x" * nbytes] * n
    assert all(synk.run(programs.all_reduce_often))
    for _ in range(3):
        print_sums()
    counter = synk.data(np.zeros(100))
    turns = synk.run(rank_programs.add_ones, counter, 50)
    assert np.asarray(counter).tolist() == [50.0 * n] * 100
    assert sorted(turn for rank_turns in turns for turn in rank_turns) == list(range(50 * n))
    print_sums()


def add_at_random(context: synk.RankContext, rows: Any, seed: int, failing_rank: int, times: int) -> list[float]:
    """Add 1 to a row under its lock, many times; one rank may fail in between.  Return the rows' values."""
    rng = np.random.default_rng((seed, context.number))
    for i in range(times):
        k = int(rng.integers(len(rows)))
        with context.lock(k) as lock:
            lock.pull(rows[k : k + 1])
            assert rows.array[k].min() == rows.array[k].max(), "others have written meanwhile"
            if context.number == failing_rank and i == times // 2:
                raise KeyError("a fault")
            rows.array[k] += 1
            lock.push(rows[k : k + 1])
    context.barrier("end")
    values = []
    for k in range(len(rows)):
        with context.lock(k) as lock:
            lock.pull(rows[k : k + 1])
            values.append(float(rows.array[k, -1]))
    return values


def get_last_item(context: synk.RankContext, rows: Any) -> float:
    """Return the last item of this rank's rows."""
    return float(rows.array[-1, -1])


def use_locks() -> None:
    """Use locks across hosts at random; after a failure all ranks continue."""
    n = fork()
    from hosts import programs

    before = synk.bytes_sent()
    for failing_rank in range(n + 3):  # from n on no rank fails
        rows = create_unpublished((n + 3, 1000 if failing_rank % 2 else 1_500_000), "float32")
        rows[...] = 5
        assert synk.run(programs.get_last_item, rows) == [5.0] + [0.0] * (n - 1)
        rows[...] = 0
        try:
            results = synk.run(programs.add_at_random, rows, failing_rank, failing_rank, 10)
        except (KeyError, synk.WorkerError) as error:
            assert failing_rank < n and "a fault" in str(error), error
        else:
            assert failing_rank >= n
            assert all(result == results[0] for result in results) and sum(results[0]) == 10 * n, results
    assert synk.bytes_sent() - before > 6_000_000  # at least one row of the first host
    print("passed")


def run_rule_tests() -> None:
    """Run the tests of asynchronous rules from test_exchange_rules.py on these hosts."""
    n = fork()
    import test_exchange_rules as tests

    tests.check_pushes(n, 300)
    for on_device in tests.ON_DEVICE:
        for rule in tests.ELASTIC:
            tests.test_easgd_exchanges_equal_a_replay(n, rule, on_device)
        tests.test_downpour_exchanges_equal_a_replay(n, on_device)
        tests.test_downpour_keeps_unpushed_gradients(n, 2, 3, on_device)
        tests.test_gosgd_keeps_weights_and_weighted_mean(n, on_device)
        tests.test_gosgd_loses_nothing_in_training(n, on_device)
    tests.test_easgd_exchange_keeps_the_sum(n)
    tests.test_easgd_alpha_of_one_swaps_and_half_averages(n)
    for replace in (False, True):
        tests.test_swap_exchanges_parameters(n, replace)
    print("passed")


def train_by_trainer() -> None:
    """Train under each synchronous rule, also from a checkpoint, and print digests."""
    import tempfile

    from trainer_model import SYNCHRONOUS, Model

    from synkhronos.training import CheckpointFolder

    fork()
    for name in SYNCHRONOUS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            model = Model(name)
            losses = [r.loss for r in model.epochs(5, 2, valid=None, checkpoints=CheckpointFolder(folder))]
            again = Model(name)
            resumed_losses = [r.loss for r in again.epochs(5, 3, checkpoints=CheckpointFolder(folder), resume="latest")]
        print(name, compute_digest(model.values(), losses, again.values(), resumed_losses))


def train_with_options() -> None:
    """Train with a sharded optimizer and other options, on rows that are not a multiple of the ranks; print digests."""
    import tempfile

    from trainer_model import Model, X, Y

    from synkhronos.training import CheckpointFolder

    fork()
    kwargs: dict[str, Any] = {"clip_norm": 0.5, "ema": 0.9, "num_slices": 2}
    for rule, shards in ((updates.momentum, False), (updates.adam, True)):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            model = Model("BSP", update=rule, shard_optimizer=shards, **kwargs)
            losses = [r.loss for r in model.epochs(5, 2, rows=47, valid=(X, Y), checkpoints=CheckpointFolder(folder))]
            again = Model("BSP", update=rule, shard_optimizer=shards, **kwargs)
            resumed_losses = [
                r.loss for r in again.epochs(5, 4, rows=47, checkpoints=CheckpointFolder(folder), resume="latest")
            ]
        averages = [average.get_value() for average in again.trainer.get_ema()]
        print(rule.__name__, compute_digest(model.values(), losses, again.values(), resumed_losses, *averages))


def train_asynchronously() -> None:
    """Train under each asynchronous rule, and resume from a checkpoint."""
    import tempfile

    from trainer_model import ALL, SYNCHRONOUS, Model, X, Y

    from synkhronos.training import CheckpointFolder

    fork()
    for name in ALL:
        if name in SYNCHRONOUS:
            continue
        rate = 0.01 if name in ("Downpour", "ASGD") else 0.05
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            model = Model(name, rate=rate)
            first, *_, last = model.epochs(5, 8, valid=(X, Y), checkpoints=CheckpointFolder(folder, keep=9))
            assert model.count_uses().tolist() == [8.0] * len(X), name
            assert last.validation["mse"] < 0.3 * first.loss, (name, first, last)
            mse = np.mean((X @ model.w.get_value() + model.b.get_value() - Y) ** 2)
            np.testing.assert_allclose(last.validation["mse"], mse, err_msg=name)
            again = Model(name, rate=rate)
            *_, last_report = again.epochs(5, 16, valid=(X, Y), checkpoints=CheckpointFolder(folder), resume="latest")
            assert again.count_uses().tolist() == [16.0] * len(X), name
            assert last_report.validation["mse"] < last.validation["mse"], (name, last, last_report)
    print("passed")


@dataclass(frozen=True)
class KillAndRun(ranks.Command):
    """Command at which a rank's process is killed, or the agent of its host.

    Attributes
    ----------
    command : Command
        The command that all ranks run.
    rank : int
    seconds : float
        Time of the kill, after the command's start.
    kills_agent : bool
    """

    command: ranks.Command
    rank: int
    seconds: float
    kills_agent: bool = False

    @property
    def program_layout(self) -> Any:
        """Layout of the memory of the program, for the agents."""
        return self.command.program_layout

    def run(self, rank: ranks.Rank) -> Any:
        """Run the command."""
        if rank.number == self.rank and self.kills_agent:
            os.kill(os.getppid(), signal.SIGKILL)
        elif rank.number == self.rank:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return self.command.run(rank)


class Killer:
    """Kills workers, or agents, at some commands of trainings that survive it, while it is in use.

    Attributes
    ----------
    moments : dict of int to (rank, seconds) or (rank, seconds, bool)
        Further arguments of `KillAndRun`, by the command's number since the first copy of the ranks' state.
    count : int
        Number of commands since then.
    """

    def __init__(self) -> None:
        from hosts import programs  # the others find the command by its name

        self.command, self.post, self.copy = programs.KillAndRun, Mailbox.post, RecoveryPolicy._copy_state
        self.moments: dict[int, Any] = {}
        self.count, self.is_armed = 0, False

    def __enter__(self) -> Killer:
        self.patches = contextlib.ExitStack()
        for owner, name, function in (
            (Mailbox, "post", self.send),
            (RecoveryPolicy, "_copy_state", self.copy_and_arm),
        ):
            self.patches.enter_context(mock.patch.object(owner, name, partialmethod(_call, function)))
        return self

    def __exit__(self, *error: object) -> None:
        self.patches.close()

    def copy_and_arm(self, recovery: RecoveryPolicy) -> None:
        """Copy the ranks' state: without a copy a death ends the training."""
        self.copy(recovery)
        self.is_armed = True

    def send(self, mailbox: Mailbox, number: int, command: ranks.Command) -> None:
        """Post a command."""
        session = ranks.get_session()
        if self.is_armed and session._n_keep_memory_contexts:
            self.count += 1
            if self.count in self.moments and session.size > self.moments[self.count][0]:
                command = self.command(command, *self.moments[self.count])
        self.post(mailbox, number, command)


def _call(owner: Any, function: Any, *args: Any) -> Any:
    """Call a function in a method's place."""
    return function(owner, *args)


def describe_process(context: synk.RankContext, kills_server: bool = False) -> tuple[int, str, str | None]:
    """Return this process's id, its working directory, and a variable; kill the fork server that has forked it."""
    others = set(context.all_gather(os.getpid()))
    if kills_server and context.number == context.size - 1:
        for pid in list_children(os.getppid()):
            if pid not in others:
                os.kill(pid, signal.SIGKILL)
    return os.getpid(), os.getcwd(), os.environ.get("SYNKHRONOS_TEST")


def replace_killed_workers() -> None:
    """Replace killed workers after a fork server was killed, and after changes of what workers inherit."""
    n = fork()
    from hosts import programs  # other ranks import it by its name

    session, folder = ranks.get_session(), os.getcwd()
    mpirun_pid = session._group.link._mpirun.pid
    with session.keep_memory():
        for kills_server, name, value in ((True, folder, None), (False, "/", "1"), (False, "/", "1")):
            synk.run(programs.describe_process, kills_server)
            os.chdir(name)
            with mock.patch.dict(os.environ, {"SYNKHRONOS_TEST": value} if value else {}):
                os.kill(session.worker_pids[1], signal.SIGKILL)
                with pytest.raises(synk.WorkerError, match="rank 1 .* was killed by SIGKILL"):
                    synk.run(programs.all_reduce_often)
                session.replace_workers()
                assert [where for _, *where in synk.run(programs.describe_process)] == [[name, value]] * n
            os.chdir(folder)
    assert session._group.link._mpirun.pid == mpirun_pid  # no agent was lost
    print("passed")


def train_through_deaths(name: str, seed: str, source: str = "arrays") -> None:
    """Train without deaths, and with some at random commands; compare rows, and a synchronous rule's numbers."""
    from trainer_model import SYNCHRONOUS, Model, X, make_epochs

    n, chosen = fork(), random.Random(seed)
    mpirun_pid = ranks.get_session()._group.link._mpirun.pid

    def train(kills_mpirun: bool) -> tuple[Any, list[Any]]:
        model, reports = Model(name), []
        for report in make_epochs(model, source, 2):
            reports.append(report)
            if kills_mpirun and len(reports) == 1:
                os.kill(ranks.get_session()._group.link._mpirun.pid, signal.SIGKILL)
        assert model.count_uses().tolist() == [2.0] * len(X), (name, model.count_uses())
        return model.values(), reports

    with Killer() as killer:
        expected, expected_reports = train(False)
        moments = chosen.sample(range(1, killer.count // 2), 2)
        killer.count, killer.is_armed = 0, False
        killer.moments = {k: (rank, chosen.random() / 100) for k, rank in zip(moments, (1, n - 1), strict=True)}
        values, reports = train(name == "LocalSGD")
    deaths = [death for report in reports for death in report.deaths]
    assert deaths and all("SIGKILL" in death["cause"] for death in deaths), deaths
    assert name != "LocalSGD" or any("mpirun, which connects the hosts" in death["cause"] for death in deaths), deaths
    assert ranks.get_session().size == n and [r.rows_seen for r in reports] == [r.rows_seen for r in expected_reports]
    # The agents stay after the death of a worker.
    assert (ranks.get_session()._group.link._mpirun.pid == mpirun_pid) == (name != "LocalSGD")
    if name in SYNCHRONOUS:
        np.testing.assert_array_equal(values, expected)
        assert [(r.loss, r.validation) for r in reports] == [(r.loss, r.validation) for r in expected_reports]
    print("passed")


def train_from_loader_by_easgd() -> None:
    """Train from a loader by an exchange rule that needs rows on all hosts."""
    from trainer_model import Model, make_epochs

    fork()
    with pytest.raises(ValueError, match="^x_data: on several hosts a Loader needs the exchange rule BSP"):
        make_epochs(Model("EASGD"), "loader", 1)
    print("passed")


def train_through_loss_of_host(name: str, fault: str, source: str = "arrays") -> None:
    """Train on through the loss of the last host; compare with a run resumed on the ranks that are left.

    The fault is that its "agent" is killed, or the whole "host".  Of three hosts, ``mpirun`` does not say which it was.
    """
    import tempfile

    from trainer_model import SYNCHRONOUS, Model, X, Y, make_epochs, take_rows

    from hosts import simulated
    from synkhronos.training import CheckpointFolder

    n = fork()
    parts = synk.data_parts(partial(take_rows, Y), len(Y), name="parts")
    (host, count), is_ambiguous = HOSTS[-1].split(":"), fault == "host" and len(HOSTS) > 2
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Killer() as killer, contextlib.ExitStack() as stack:
        model, reports = Model(name), []
        for report in make_epochs(model, source, 3, checkpoints=CheckpointFolder(folder, keep=9)):
            reports.append(report)
            if len(reports) > 1:
                continue
            if fault == "agent":
                killer.moments[killer.count + 2] = n - 1, 0.0, True
            else:
                counts = np.sum(synk.gather(model.counts, nd_up=1)[: n - int(count)], axis=0)
                if is_ambiguous:
                    stack.enter_context(mock.patch.object(mpirun, "find_lost_hosts", return_value=[1, 2]))
                assert simulated.send_request({"operation": "kill", "host": host}) == 0
        left, deaths = ranks.get_session().size, reports[1].deaths
        assert left == n - int(count) and [r.rows_seen for r in reports] == [60, 120, 180], (left, deaths)
        assert [(death["rank"], death["host"]) for death in deaths[-1:]] == [(left, host)], deaths
        cause = "could not start: the hosts" if is_ambiguous else "was lost"
        assert len(deaths) == (3 if is_ambiguous else 1) and cause in deaths[-1]["cause"], deaths
        assert f"rank {left} on host {host} " in str(reports[1])
        np.testing.assert_array_equal(synk.function([model.y], (model.y, "gather"))(parts), Y)  # loaded again
        if fault == "host":  # killed before the second epoch
            assert (model.count_uses() - counts).tolist() == [2] * len(Y), (model.count_uses(), counts)
        synk.close()
        fork.cache_clear()
        synk.fork(left, use_gpu=False)
        resumed, checkpoints = Model(name), CheckpointFolder(folder, keep=9)
        resumed_reports = list(resumed.epochs(5, 3, valid=(X, Y), resume=checkpoints.get_path(len(X))))
    if name in SYNCHRONOUS and source != "parts":
        np.testing.assert_array_equal(resumed.values(), model.values())
        assert [(r.loss, r.validation) for r in resumed_reports] == [(r.loss, r.validation) for r in reports[1:]]
    synk.close()
    print("passed")


def train_on_parts_through_loss_of_host(name: str, step: str) -> None:
    """Lose the last host within an epoch over `data_parts`, after some steps; compare with one process.

    The agent of that host is killed, and later a worker.  Under BSP the optimizer is sharded.
    """
    from trainer_model import Model, X, Y, make_epochs

    from synkhronos.training.trainer.joint_batch_loop import JointBatchLoop

    n, n_left, batch_size = fork(), fork() - int(HOSTS[-1].split(":")[1]), 5
    steps: list[Any] = []
    take_steps = JointBatchLoop.take_steps

    def take_steps_and_record(loop: Any, rows: list[Any]) -> Any:
        losses = take_steps(loop, rows)
        steps.extend(np.array(indexes) for indexes in rows)
        return losses

    def find_last_lost_host(*arguments: Any) -> list[int]:
        return find_lost_hosts(*arguments)[-1:]

    # mpirun's messages may leave open which of two hosts was lost.  Both would be started again, and the last one, where
    # the agent alone is killed here, would come back.
    find_lost_hosts = mpirun.find_lost_hosts
    only_last = mock.patch.object(mpirun, "find_lost_hosts", find_last_lost_host)
    with Killer() as killer, only_last, mock.patch.object(JointBatchLoop, "take_steps", take_steps_and_record):
        options = {"update": updates.momentum, "shard_optimizer": True} if name == "BSP" else {}
        model, reports, orders = Model(name, rate=0.01, **options), [], []
        for report in make_epochs(model, "parts", 3, every=int(step) + 1):
            reports.append(report)
            data = model.trainer._loop.data
            orders.append(data.row_order.data[: data.n_epoch_rows].tolist())
            if len(reports) == 1:  # after `step` + 1 steps of the first epoch, two copies or so later
                killer.moments = {killer.count + 4: (n - 1, 0.0, True), killer.count + 40: (1, 0.0)}
    assert ranks.get_session().size == n_left and sum(len(r.deaths) for r in reports) == 2, reports
    for order in orders:
        assert len(set(order)) == len(order) > len(Y) - batch_size * n
    epochs = [order for order, report in zip(orders, reports, strict=True) if report.epoch % 1 == 0]
    assert reports[-1].rows_seen == sum(map(len, epochs))
    if steps:
        np.testing.assert_array_equal(np.concatenate(steps), np.concatenate(epochs))
        x, y, w, b = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(4), "w"), shared(np.zeros(1), "b")
        loss = ((tensor.dot(x, w) + b[0] - y) ** 2).mean()
        train = make_train_function_serial(loss, [w, b], x, y, updates.momentum, learning_rate=0.01)
        for rows in steps:
            train(X[rows], Y[rows])
        np.testing.assert_allclose(model.values(), [*w.get_value(), *b.get_value()], rtol=1e-12)
    print("passed")


def serve() -> None:
    """Run the programs named on standard input, each with its arguments; print a line at the end of each."""
    slow_down_agents()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        globals()[name](*arguments)
        print("ended", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    synk.close()
