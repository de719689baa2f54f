"""Time of the networks of Theano-MPI's table, beside PyTorch.

Seconds of training, and of communication, for 5,120 images: AlexNet, GoogLeNet, VGG16 and ResNet-50 of demos/zoo, with
the batch sizes of that table, on 1, 2, 4, ... GPUs.  They are compared with the same networks under PyTorch's
DistributedDataParallel, in the same run, and with the times that Theano-MPI published for K80s.

Images are synthetic and in host memory: Synkhronos selects them from Data objects by shuffled lists of indexes, and
PyTorch has prepared batches in page-locked memory.  Both sides all-reduce gradients while they compute others, so
communication is the additional time of a step compared with one GPU.  The sides run one after the other, in separate
processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from time import perf_counter
from typing import Any

from benchmarks import make_parser
from benchmarks._measure import SideError, Table, print_criterion, print_heading, require_gpus, run_side
from benchmarks.gpu_resnet import BLOCKS, PRECISIONS

#: Number of images of Theano-MPI's table.
IMAGES = 5120
#: Numbers of K80s in Theano-MPI's table.
K80 = (1, 2, 4, 8)
#: Network, height and width of the images, batch size, and Theano-MPI's seconds for each number of K80s.
ROWS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "AlexNet-128b": ("AlexNet", 227, 128, ("20.50", "10.35+0.78", "5.13+0.54", "2.63+0.61")),
    "GoogLeNet-32b": ("GoogLeNet", 224, 32, ("63.89", "31.40+1.00", "15.51+0.71", "7.69+0.80")),
    "VGG16-16b": ("VGG16", 224, 16, ("358.29", "176.08+13.90", "90.44+9.28", "55.12+12.59")),
    "VGG16-32b": ("VGG16", 224, 32, ("343.37", "169.12+7.14", "86.97+4.80", "43.29+5.41")),
    "ResNet50-64b": ("ResNet50", 224, 64, ("163.15", "80.09+0.81", "40.25+0.56", "20.12+0.57")),
}
#: Required speed relative to DDP.
BESIDE_DDP = 1.1
#: Settings of both sides, of which ``images`` for each GPU are there to pick from, and those with ``--cpu``.
SETTINGS = {"steps": 40, "warm": 10, "images": 512, "classes": 1000}
SMALL_SETTINGS = {"steps": 2, "warm": 1, "images": 8, "classes": 10, "size": 67, "batch_size": 2}


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser("gpu_zoo", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 1, 2 and 4, as far as there are)")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of the table ({', '.join(ROWS)})")
    add("--precision", choices=PRECISIONS, default="tf32", help="of products (%(default)s)")
    add("--cpu", action="store_true", help="a few small images on CPU cores, to try the benchmark with AlexNet-128b")
    add("--limit", type=float, default=300, metavar="S", help="seconds for each process (%(default)s)")
    add("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch and torchvision")
    return parser.parse_args()


def make_settings(options: argparse.Namespace, row: str, n: int) -> dict[str, Any]:
    """Return the settings of Synkhronos' side."""
    network, size, batch, _ = ROWS[row]
    return {
        "network": network,
        "size": size,
        "batch_size": batch,
        **(SMALL_SETTINGS if options.cpu else SETTINGS),
        "precision": options.precision,
        "device": "cpu" if options.cpu else "gpu",
        "n": n,
        "where": ["host"],
        "exchange": None,
        "compiled": False,
    }


def make_torch_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of PyTorch's side; ResNet-50 is torchvision's."""
    if settings["network"] == "ResNet50":
        return {
            **{name: value for name, value in settings.items() if name != "network"},
            "blocks": BLOCKS[50],
            "width": 64,
        }
    return settings


class TimeTable:
    """Table of times, printed row by row, and goals, printed at the end."""

    def __init__(self) -> None:
        self._single_gpu_steps: dict[tuple[str, str], float] = {}
        self._goals: list[tuple[str, float]] = []
        self._remarks: list[str] = []
        self._table = Table({"": 13, "GPUs": 4, "ours": 15, "DDP": 15, "DDP/ours": 8, "K80": 12})

    def _format_times(self, row: str, side: str, n: int, images: int, step: float) -> str:
        """Return the seconds of training and of communication, for the table's images, as text."""
        steps = IMAGES / images
        if n == 1:
            self._single_gpu_steps[row, side] = step
        single_gpu_step = self._single_gpu_steps.get((row, side))
        if n == 1 or single_gpu_step is None:
            return f"{steps * step:.2f}"
        return f"{steps * single_gpu_step:.2f}{steps * (step - single_gpu_step):+.2f}"

    def add(self, row: str, n: int, settings: dict[str, Any], result: Any, ddp: Any) -> None:
        """Print a row."""
        images = n * settings["batch_size"]
        ours, theirs = (side["results"]["host"] for side in (result, ddp))
        steps = {"ours": ours["seconds"], "ddp": theirs["seconds"]}
        cells = [self._format_times(row, side, n, images, step) for side, step in steps.items()]
        ratio = steps["ddp"] / steps["ours"]
        k80 = ROWS[row][3][K80.index(n)] if n in K80 else ""
        self._table.print_row(row, str(n), *cells, f"{ratio:.3f}", k80)
        self._goals.append((f"{row}, n = {n}: times as fast as DDP", ratio))
        self._remarks.append(
            f"{row}, n = {n}: first step {ours['first']:.0f} s; "
            f"{result['parameters']:,} parameters, DDP {ddp['parameters']:,}; "
            f"losses at the end {ours['loss']:.3f}, the penalty of large weights included, DDP {theirs['loss']:.3f}"
        )
        if result["parameters"] != ddp["parameters"]:
            raise SystemExit(f"{row}: the two sides have different networks: {self._remarks[-1]}")

    def print_summary(self) -> None:
        """Print remarks, and each goal with PASS or FAIL."""
        print("", *self._remarks, "", sep="\n")
        for label, ratio in self._goals:
            print_criterion(label, ratio, " times", at_least=BESIDE_DDP)


def main() -> None:
    """Run the benchmark."""
    options = parse_options()
    n_available = 2 if options.cpu else require_gpus(None)
    counts = options.ranks or [n for n in (1, 2, 4) if n <= n_available]
    print_heading(f"training + communication, seconds for {IMAGES:,} images, {options.precision}")
    start = perf_counter()
    table = TimeTable()
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            "JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[options.precision][0],
            "JAX_COMPILATION_CACHE_DIR": cache,
            **({"JAX_PLATFORMS": "cpu"} if options.cpu else {}),
        }
        for row in options.rows:
            for n in counts:
                settings = make_settings(options, row, n)
                try:
                    result = run_side(["_resnet"], settings, options.limit, **environment)
                    ddp = run_side(["_ddp"], make_torch_settings(settings), options.limit, options.torch_python)
                except SideError as failure:
                    print(f"{row}, n = {n}: {failure}", flush=True)
                    continue
                table.add(row, n, settings, result, ddp)
    table.print_summary()
    print(f"\n{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
