"""Time of exchange rules, and the time that they save.

Three measurements, on the CPU:

* the exchange with a centre of 102 MB (ResNet-50's parameters), beside NumPy doing the same in blocks of 1 MB;
* ranks of which one is three times as slow, since it sleeps: steps a second under EASGD and GoSGD, by which no rank
  waits for another, and under BSP, beside the sum of what the ranks do alone;
* the share of the time that exchanges take after each 10 steps of the MNIST network.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, graph_library, heading, interleaved, ranks
from benchmarks.gpu_step import LAYERS, model
from synkhronos import rules
from synkhronos.training import make_trainer, updates

#: ResNet-50's parameters.
SIZE = 25_557_032
BLOCK = 1 << 18
ALPHA = 0.3
#: Seconds of a step of a rank that is not slow.
STEP = 0.01


def times_of_exchanges(worker: Any, rule: rules.Rule, params: list[Any], shared: Any, rounds: int) -> Any:
    """Measure exchanges with the centre, and the same computation in NumPy, in turn."""
    state = rules.State(params, [], shared)
    rule.setup(worker, state)
    x, centre, d = np.ones(SIZE, np.float32), np.ones(SIZE, np.float32), np.empty(BLOCK, np.float32)

    def plain() -> None:
        for at in range(0, SIZE, BLOCK):
            a, c = x[at : at + BLOCK], centre[at : at + BLOCK]
            e = d[: a.size]
            np.subtract(a, c, out=e)
            np.multiply(e, np.float32(ALPHA), out=e)
            np.subtract(a, e, out=a)
            np.add(c, e, out=c)

    return interleaved({"NumPy": plain, "rule": lambda: rule.exchange(worker, state)}, rounds)


def one_exchange(worker: Any, rule: rules.Rule, params: list[Any], shared: Any, who: int) -> float:
    """Return the seconds of one rank's exchange with the centre."""
    kept = worker.get_storage("exchange")
    if "state" not in kept:
        kept["state"] = rules.State(params, [], shared)
        rule.setup(worker, kept["state"])
        rule.exchange(worker, kept["state"])
    worker.barrier("begin")
    began = time.perf_counter()
    if worker.number == who:
        rule.exchange(worker, kept["state"])
    took = time.perf_counter() - began
    worker.barrier("end")
    return took


def rows_a_second(worker: Any, rule: rules.Rule | None, params: list[Any], shared: Any, steps: int, slow: int) -> float:
    """Take steps that only sleep, with a rule or without; return the steps per second of all ranks."""
    state = rules.State(params, [], shared)
    pause = STEP * (3 if worker.number == slow else 1)
    if rule is None:
        began = time.perf_counter()
        for _ in range(steps):
            time.sleep(pause)
        return steps / (time.perf_counter() - began)
    rule.setup(worker, state)
    worker.barrier("begin")
    began, taken = time.perf_counter(), 0
    total = steps * worker.size
    while taken < total:
        if rule.asynchronous:
            with worker.lock(worker.size + 1) as ticket:
                taken = ticket.turn
            if taken >= total:
                break
        else:
            taken += worker.size
        time.sleep(pause)
        left = rule.count_steps_left(state)
        state.step += 1
        state.steps_since_exchange += 1
        if left == 1:
            rule.exchange(worker, state)
            state.steps_since_exchange = 0
    worker.barrier("end")
    return total / (time.perf_counter() - began)


def exchange_of_102_mb(rounds: int) -> None:
    """Print the time of an exchange."""
    library, _ = graph_library()
    heading("An exchange of 102 MB with the centre, one rank")
    with ranks(1):
        rule, params = rules.EASGD(alpha=ALPHA), [library.shared(np.ones(SIZE, np.float32), "w")]
        memory = rules.shared_memory(rule, 1, SIZE, np.dtype("float32"))
        times = synk.run(times_of_exchanges, rule, params, memory, rounds)[0]
    middle = {name: median(values) for name, values in times.items()}
    table = Table({"": 8, "median": 9})
    for name, value in middle.items():
        table.row(name, duration(value))
    bar("exchange, relative to NumPy", middle["rule"] / middle["NumPy"], " times", most=1.3)


def one_slow_rank(steps: int) -> None:
    """Print the steps per second of all ranks when one is slow."""
    library, _ = graph_library()
    heading("Two ranks, of which one is three times as slow; parameters of 5 MB")
    size = 1_276_810
    params = [library.shared(np.ones(size, np.float32), "w")]
    table = Table({"": 14, "steps/s": 9, "of the sum": 10})
    with ranks(2):
        alone = sum(synk.run(rows_a_second, None, params, {}, steps, 1))
        table.row("ranks alone", f"{alone:.1f}", "1.00")
        found = {}
        for name, rule in {
            "EASGD": rules.EASGD(period=10),
            "GoSGD": rules.GoSGD(0.1),
            "LocalSGD": rules.LocalSGD(10),
            "BSP": rules.BSP("params"),
        }.items():
            memory = rules.shared_memory(rule, 2, size, np.dtype("float32"))
            found[name] = synk.run(rows_a_second, rule, params, memory, steps, 1)[0] / alone
            table.row(name, f"{found[name] * alone:.1f}", f"{found[name]:.2f}")
    bar("EASGD, relative to the sum", found["EASGD"], "", least=0.9)
    bar("GoSGD, relative to the sum", found["GoSGD"], "", least=0.9)
    bar("EASGD, relative to BSP", found["EASGD"] / found["BSP"], " times", least=1.8)


def cost_at_ten_steps(batch: int) -> None:
    """Print the share of the time that exchanges take."""
    _, tensor = graph_library()
    heading(f"MNIST's network 784-800-800-10, batch {batch} a rank, 2 ranks, an exchange after each 10 steps")
    rng = np.random.default_rng(0)
    count = 80 * batch
    table = Table({"": 10, "compute": 9, "exchange": 9, "wait": 9, "cost": 8})
    with ranks(2):
        images = synk.data(rng.random((count, LAYERS[0]), dtype=np.float32))
        labels = synk.data(rng.integers(0, LAYERS[-1], count).astype("int32"))
        for name, rule in {
            "EASGD": rules.EASGD(period=10),
            "ASGD": rules.ASGD(10),
            "GoSGD": rules.GoSGD(0.1),
            "LocalSGD": rules.LocalSGD(10),
            "DiLoCo": rules.DiLoCo(10),
        }.items():
            x, y = tensor.fmatrix("x"), tensor.ivector("y")
            loss, params = model(x, y)
            trainer = make_trainer(loss, params, x, y, updates.momentum, rule, learning_rate=0.01)
            *_, report = trainer.epochs(images, labels, batch_size=batch, epochs=2)
            spent = report.seconds
            cost = spent["exchange"] / spent["compute"]
            table.row(name, *(duration(spent[key]) for key in ("compute", "exchange", "wait")), f"{cost:.2%}")
            bar(f"cost of {name}, relative to its steps", 100 * cost, " %", most=2)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchange", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps with a slow rank (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=500, help="rows of a step (default: %(default)s)")
    options = parser.parse_args()
    exchange_of_102_mb(options.rounds)
    one_slow_rank(options.steps)
    cost_at_ten_steps(options.batch)


if __name__ == "__main__":
    main()
