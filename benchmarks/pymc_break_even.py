"""Speed of ranks relative to PyMC alone, by number of rows, and the number of rows from which ranks are faster.

A hierarchical logistic regression with 10² to 10⁶ rows.  For each number of parallel chains, gradients are computed by
PyMC alone, with one BLAS thread for each process, and by the ranks, of which each chain has its share.  Both sides are
measured in turn.  The ratio is the speed of the ranks relative to PyMC: below 1, ``data_parallel(model, ranks="auto")``
leaves the model to PyMC.  Compiling is the time until the first gradient; PyTensor may find its code in the cache on
disk.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import perf_counter

from threadpoolctl import threadpool_limits

from benchmarks import make_parser
from benchmarks._measure import Table, fork_ranks, format_duration, prepare_pymc, print_heading
from benchmarks.pymc_rows import make_evaluator, make_logistic
from synkhronos.extensions.chains import measure_evaluation_rate
from synkhronos.ranks import count_available_cores


def compare(rows: int, options: argparse.Namespace, table: Table) -> list[float]:
    """Measure a model, print a line for each number of chains, and return the ratios."""
    from synkhronos.extensions.pymc import data_parallel

    model = make_logistic(rows, options.columns)
    evaluators, compiling = [], []
    for variant in (model, data_parallel(model)):
        start = perf_counter()
        evaluate = make_evaluator(variant)
        evaluate()
        compiling.append(perf_counter() - start)
        evaluators.append(evaluate)
    ratios = []
    for chains in options.chains:
        pymc_rates: list[float] = []
        rank_rates: list[float] = []
        with threadpool_limits(1):
            for _ in range(options.rounds):
                pymc_rates.append(measure_evaluation_rate(evaluators[0], chains))
                rank_rates.append(measure_evaluation_rate(evaluators[1], chains))
        round_ratios = [ranks / pymc for ranks, pymc in zip(rank_rates, pymc_rates, strict=True)]
        ratios.append(median(round_ratios))
        table.print_row(
            f"{rows:,}",
            str(chains),
            format_duration(chains / median(pymc_rates)),
            format_duration(chains / median(rank_rates)),
            f"{ratios[-1]:.2f}",
            f"{min(round_ratios):.2f} to {max(round_ratios):.2f}",
            *map(format_duration, compiling),
            f"{os.getloadavg()[0]:.1f}",
        )
    return ratios


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("pymc_break_even", __doc__)
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
    print_heading(f"PyMC: a gradient of each chain, {options.ranks} ranks in all, {options.columns} columns")
    titles = {"rows": 9, "chains": 6, "PyMC": 8, "ranks": 8, "ratio": 5, "rounds": 14}
    table = Table({**titles, "compiling: PyMC": 15, "compiling: ranks": 16, "load": 5})
    with fork_ranks(options.ranks):
        ratios = {rows: compare(rows, options, table) for rows in options.rows}
    for position, chains in enumerate(options.chains):
        faster = [rows for rows, round_ratios in ratios.items() if round_ratios[position] >= 1]
        print(f"{chains} chains: ranks are as fast as PyMC from {min(faster):,} rows on" if faster else
              f"{chains} chains: PyMC alone is faster")  # fmt: skip


if __name__ == "__main__":
    main()
