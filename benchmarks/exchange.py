"""Time of exchange rules, and the time that they save.

Three measurements, on the CPU:

* the exchange with a centre of 102 MB (ResNet-50's parameters), compared with the same computation by NumPy in blocks
  of 1 MB;
* two ranks, one of which sleeps three times as long: steps per second under EASGD and GoSGD, where no rank waits for
  another, and under BSP, compared with the sum of the ranks' own rates;
* the share of time that exchanges take after every 10 steps of the MNIST network.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    Table,
    fork_ranks,
    format_duration,
    import_graph_library,
    print_criterion,
    print_heading,
    time_interleaved,
)
from benchmarks.gpu_step import LAYERS, build_mlp
from synkhronos import exchange_rules
from synkhronos.training import make_trainer, updates

#: ResNet-50's parameters.
SIZE = 25_557_032
BLOCK = 1 << 18
ALPHA = 0.3
#: Seconds of a step of the faster rank.
STEP = 0.01


def time_exchanges(
    context: Any, rule: exchange_rules.ExchangeRule, params: list[Any], shared_arrays: Any, rounds: int
) -> Any:
    """Return the seconds of exchanges with the centre and of the same computation in NumPy, measured in turn."""
    state = exchange_rules.ExchangeState(params, [], shared_arrays)
    rule.setup(context, state)
    x, centre, buffer = np.ones(SIZE, np.float32), np.ones(SIZE, np.float32), np.empty(BLOCK, np.float32)

    def exchange_in_numpy() -> None:
        for start in range(0, SIZE, BLOCK):
            a, c = x[start : start + BLOCK], centre[start : start + BLOCK]
            difference = buffer[: a.size]
            np.subtract(a, c, out=difference)
            np.multiply(difference, np.float32(ALPHA), out=difference)
            np.subtract(a, difference, out=a)
            np.add(c, difference, out=c)

    return time_interleaved({"NumPy": exchange_in_numpy, "rule": lambda: rule.exchange(context, state)}, rounds)


def time_one_exchange(
    context: Any, rule: exchange_rules.ExchangeRule, params: list[Any], shared_arrays: Any, rank: int
) -> float:
    """Return the seconds of one rank's exchange with the centre."""
    storage = context.get_persistent_dict("exchange")
    if "state" not in storage:
        storage["state"] = exchange_rules.ExchangeState(params, [], shared_arrays)
        rule.setup(context, storage["state"])
        rule.exchange(context, storage["state"])
    context.barrier("begin")
    start = time.perf_counter()
    if context.number == rank:
        rule.exchange(context, storage["state"])
    seconds = time.perf_counter() - start
    context.barrier("end")
    return seconds


def measure_steps_per_second(
    context: Any,
    rule: exchange_rules.ExchangeRule | None,
    params: list[Any],
    shared_arrays: Any,
    steps: int,
    slow_rank: int,
) -> float:
    """Take steps that only sleep; return the steps per second of all ranks, or, without a rule, of this rank."""
    state = exchange_rules.ExchangeState(params, [], shared_arrays)
    pause = STEP * (3 if context.number == slow_rank else 1)
    if rule is None:
        start = time.perf_counter()
        for _ in range(steps):
            time.sleep(pause)
        return steps / (time.perf_counter() - start)
    rule.setup(context, state)
    context.barrier("begin")
    start, n_taken = time.perf_counter(), 0
    total = steps * context.size
    while n_taken < total:
        if rule.asynchronous:
            with context.lock(context.size + 1) as ticket:
                n_taken = ticket.turn
            if n_taken >= total:
                break
        else:
            n_taken += context.size
        time.sleep(pause)
        steps_left = rule.count_steps_left(state)
        state.step += 1
        state.steps_since_exchange += 1
        if steps_left == 1:
            rule.exchange(context, state)
            state.steps_since_exchange = 0
    context.barrier("end")
    return total / (time.perf_counter() - start)


def compare_exchange(rounds: int) -> None:
    """Print the time of an exchange."""
    library, _ = import_graph_library()
    print_heading("An exchange of 102 MB with the centre, one rank")
    with fork_ranks(1):
        rule, params = exchange_rules.EASGD(alpha=ALPHA), [library.shared(np.ones(SIZE, np.float32), "w")]
        memory = exchange_rules.allocate_shared_arrays(rule, 1, SIZE, np.dtype("float32"))
        times = synk.run(time_exchanges, rule, params, memory, rounds)[0]
    medians = {name: median(values) for name, values in times.items()}
    table = Table({"": 8, "median": 9})
    for name, value in medians.items():
        table.print_row(name, format_duration(value))
    print_criterion("exchange, relative to NumPy", medians["rule"] / medians["NumPy"], " times", at_most=1.3)


def compare_slow_rank(steps: int) -> None:
    """Print the steps per second of all ranks when one is slow."""
    library, _ = import_graph_library()
    print_heading("Two ranks, of which one is three times as slow; parameters of 5 MB")
    size = 1_276_810
    params = [library.shared(np.ones(size, np.float32), "w")]
    table = Table({"": 14, "steps/s": 9, "of the sum": 10})
    with fork_ranks(2):
        alone = sum(synk.run(measure_steps_per_second, None, params, {}, steps, 1))
        table.print_row("ranks alone", f"{alone:.1f}", "1.00")
        speeds = {}
        for name, rule in {
            "EASGD": exchange_rules.EASGD(period=10),
            "GoSGD": exchange_rules.GoSGD(0.1),
            "LocalSGD": exchange_rules.LocalSGD(10),
            "BSP": exchange_rules.BSP("params"),
        }.items():
            memory = exchange_rules.allocate_shared_arrays(rule, 2, size, np.dtype("float32"))
            speeds[name] = synk.run(measure_steps_per_second, rule, params, memory, steps, 1)[0] / alone
            table.print_row(name, f"{speeds[name] * alone:.1f}", f"{speeds[name]:.2f}")
    print_criterion("EASGD, relative to the sum", speeds["EASGD"], "", at_least=0.9)
    print_criterion("GoSGD, relative to the sum", speeds["GoSGD"], "", at_least=0.9)
    print_criterion("EASGD, relative to BSP", speeds["EASGD"] / speeds["BSP"], " times", at_least=1.8)


def measure_exchange_share(batch: int) -> None:
    """Print the share of the time that exchanges take."""
    _, tensor = import_graph_library()
    print_heading(f"MNIST's network 784-800-800-10, batch {batch} a rank, 2 ranks, an exchange after each 10 steps")
    rng = np.random.default_rng(0)
    count = 80 * batch
    table = Table({"": 10, "compute": 9, "exchange": 9, "wait": 9, "cost": 8})
    with fork_ranks(2):
        images = synk.data(rng.random((count, LAYERS[0]), dtype=np.float32))
        labels = synk.data(rng.integers(0, LAYERS[-1], count).astype("int32"))
        for name, rule in {
            "EASGD": exchange_rules.EASGD(period=10),
            "ASGD": exchange_rules.ASGD(10),
            "GoSGD": exchange_rules.GoSGD(0.1),
            "LocalSGD": exchange_rules.LocalSGD(10),
            "DiLoCo": exchange_rules.DiLoCo(10),
        }.items():
            x, y = tensor.fmatrix("x"), tensor.ivector("y")
            loss, params, _ = build_mlp(x, y)
            trainer = make_trainer(loss, params, x, y, updates.momentum, rule, learning_rate=0.01)
            *_, report = trainer.epochs(images, labels, batch_size=batch, epochs=2)
            seconds = report.seconds
            cost = seconds["exchange"] / seconds["compute"]
            table.print_row(
                name, *(format_duration(seconds[key]) for key in ("compute", "exchange", "wait")), f"{cost:.2%}"
            )
            print_criterion(f"cost of {name}, relative to its steps", 100 * cost, " %", at_most=2)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("exchange", __doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps with a slow rank (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=500, help="rows of a step (default: %(default)s)")
    options = parser.parse_args()
    compare_exchange(options.rounds)
    compare_slow_rank(options.steps)
    measure_exchange_share(options.batch)


if __name__ == "__main__":
    main()
