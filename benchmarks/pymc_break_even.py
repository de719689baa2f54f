"""Gain of ranks over PyMC alone, by number of rows: where is the break-even?

A hierarchical logistic regression with 10² to 10⁶ rows.  For each number of parallel chains, the gradients a second of
all chains by PyMC alone, with one BLAS thread for each process, and with the chains' shares of the ranks.  Both sides
are measured in turn.  The ratio is the gain of the ranks: below 1, ``data_parallel(model, ranks="auto")`` leaves the
model to PyMC.  Compiling is the time until the first gradient; PyTensor may find its code in the cache on disk.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import perf_counter

from threadpoolctl import threadpool_limits

from benchmarks._measure import Table, duration, heading, prepare_pymc, ranks
from benchmarks.pymc_rows import evaluator, logistic
from synkhronos.extensions.chains import measure_rate
from synkhronos.ranks import count_available_cores


def compare(rows: int, options: argparse.Namespace, table: Table) -> list[float]:
    """Measure a model of some rows, print a line for each number of chains, and return the ratios."""
    from synkhronos.extensions.pymc import data_parallel

    model = logistic(rows, options.columns)
    evaluators, compiling = [], []
    for one in (model, data_parallel(model)):
        start = perf_counter()
        evaluate = evaluator(one)
        evaluate()
        compiling.append(perf_counter() - start)
        evaluators.append(evaluate)
    ratios = []
    for chains in options.chains:
        plain: list[float] = []
        ours: list[float] = []
        with threadpool_limits(1):
            for _ in range(options.rounds):
                plain.append(measure_rate(evaluators[0], chains))
                ours.append(measure_rate(evaluators[1], chains))
        each = [mine / other for mine, other in zip(ours, plain, strict=True)]
        ratios.append(median(each))
        table.row(
            f"{rows:,}",
            str(chains),
            duration(chains / median(plain)),
            duration(chains / median(ours)),
            f"{ratios[-1]:.2f}",
            f"{min(each):.2f} to {max(each):.2f}",
            *map(duration, compiling),
            f"{os.getloadavg()[0]:.1f}",
        )
    return ratios


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pymc_break_even",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=count_available_cores(), help="(default: one for each core)")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 4], help="(default: %(default)s)")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[100, 1_000, 3_000, 10_000, 30_000, 100_000, 1_000_000],
        help="(default: %(default)s)",
    )
    parser.add_argument("--columns", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (default: %(default)s)")
    options = parser.parse_args()
    if not prepare_pymc():
        return
    heading(f"PyMC: a gradient of each chain, {options.ranks} ranks in all, {options.columns} columns")
    titles = {"rows": 9, "chains": 6, "PyMC": 8, "ranks": 8, "ratio": 5, "rounds": 14}
    table = Table({**titles, "compiling: PyMC": 15, "compiling: ranks": 16, "load": 5})
    with ranks(options.ranks):
        ratios = {rows: compare(rows, options, table) for rows in options.rows}
    for position, chains in enumerate(options.chains):
        faster = [rows for rows, each in ratios.items() if each[position] >= 1]
        print(f"{chains} chains: ranks are as fast as PyMC from {min(faster):,} rows on" if faster else
              f"{chains} chains: PyMC alone is faster")  # fmt: skip


if __name__ == "__main__":
    main()
