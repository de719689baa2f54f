"""Speed of training of the Lasagne demos, on PyTensor and on Theano.

The scripts of demos/lasagne_mnist and demos/resnet, on synthetic images, in separate processes one after the other:

*mnist*: the models ``mlp`` and ``cnn`` on all GPUs, with PyTensor and with Theano 1.0.5; images per second.
*resnet*: ResNet-50 with Theano, 32 images a GPU, on one GPU and on all.

``--classic`` is a command that starts a Python with Theano 1.0.5, pygpu and Lasagne; without it that side is left out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks import make_parser
from benchmarks._measure import SideError, Table, print_criterion, print_heading, require_gpus, run_command

DEMOS = Path(__file__).resolve().parents[1] / "demos"
#: Options of the scripts, in addition to the number of ranks.
MNIST = ["--synthetic", "60000", "--batch-size", "500", "--epochs", "4"]
RESNET = ["--batch-size", "32", "--images", "320", "--epochs", "2", "--validation", "0.1"]


def measure_images_per_second(python: list[str], script: str, arguments: list[str], limit: float) -> float:
    """Train with a script, and return the images per second."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "run.json")
        run_command([*python, str(DEMOS / script), *arguments, "--quiet", "--result", str(result)], limit)
        run = json.loads(result.read_text())
    return float(sum(run["images"]) / run["seconds"])


def compare_mnist(options: argparse.Namespace, n_gpus: int) -> None:
    """Compare PyTensor with Theano."""
    device = "--cpu" if options.cpu else "--gpu"
    table = Table({"model": 6, "data": 5, "PyTensor": 12, "Theano": 12, "ratio": 6})
    ratios = {}
    for model in options.models:
        for placement in ("cpu", "gpu"):
            arguments = [model, "--ranks", str(n_gpus), device, *(options.arguments or MNIST)]
            sides = [[sys.executable, "-W", "ignore"], *([shlex.split(options.classic)] if options.classic else [])]
            script = f"lasagne_mnist/train_mnist_{placement}_data.py"
            speeds = [measure_images_per_second(python, script, arguments, options.limit) for python in sides]
            cells = [f"{speed:,.0f}/s" for speed in speeds]
            if len(speeds) == 2:
                ratios[model, placement] = speeds[0] / speeds[1]
                cells.append(f"{ratios[model, placement]:.2f}")
            table.print_row(model, "host" if placement == "cpu" else "GPUs", *cells, *[""] * (3 - len(cells)))
    print()
    for (model, placement), ratio in ratios.items():
        where = "host" if placement == "cpu" else "GPUs"
        print_criterion(
            f"{model}, data on the {where}, {n_gpus} ranks: PyTensor, relative to Theano", ratio, " times", at_least=3
        )


def compare_resnet(options: argparse.Namespace, n_gpus: int) -> None:
    """Compare one GPU with all GPUs."""
    if not options.classic:
        print("ResNet-50 with Theano: left out, without --classic")
        return
    device = "--cpu" if options.cpu else "--gpu"
    table = Table({"GPUs": 4, "images/s": 9})
    speeds = []
    for n in (1, n_gpus):
        arguments = ["--ranks", str(n), device, *(options.arguments or RESNET)]
        speeds.append(
            measure_images_per_second(shlex.split(options.classic), "resnet/train_resnet.py", arguments, options.limit)
        )
        table.print_row(str(n), f"{speeds[-1]:.1f}")
    print()
    print_criterion(
        f"ResNet-50 with Theano, 32 images a GPU, {n_gpus} GPUs to one",
        speeds[1] / speeds[0],
        " times",
        at_least=1.95,
    )


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("gpu_lasagne", __doc__)
    add = parser.add_argument
    add("--what", nargs="+", choices=("mnist", "resnet"), default=["mnist", "resnet"], help="(both)")
    add("--classic", metavar="COMMAND", help="starts a Python with Theano 1.0.5, pygpu and Lasagne")
    add("--ranks", type=int, metavar="N", help="number of GPUs (default: all)")
    add("--models", nargs="+", default=["mlp", "cnn"], help="for MNIST (mlp cnn)")
    add("--limit", type=float, default=240, metavar="S", help="seconds for each run of a script (%(default)s)")
    add("--cpu", action="store_true", help="on CPU cores, to try the benchmark itself")
    add("--arguments", type=shlex.split, metavar="WORDS", help="for the scripts, in place of the sizes above")
    options = parser.parse_args()
    count = (options.ranks or 2) if options.cpu else require_gpus(options.ranks)
    print_heading(f"the Lasagne demos on {count} GPUs")
    for part in options.what:
        try:
            (compare_mnist if part == "mnist" else compare_resnet)(options, count)
        except SideError as error:
            print(f"{part}: {error}", flush=True)


if __name__ == "__main__":
    main()
