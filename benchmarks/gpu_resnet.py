"""Speed of training of a ResNet-50, beside PyTorch.

The Lasagne network of demos/resnet, through `synkhronos.compat`, is compared with torchvision's under
DistributedDataParallel, on 1, 2, 4, ... GPUs.  A step computes the gradient of 64 synthetic images for each GPU,
all-reduces it, and updates with momentum.  Images are either in host memory or already on the GPUs.  In host memory,
Synkhronos selects them from Data objects by shuffled lists of indexes, and PyTorch has prepared batches in page-locked
memory.  Losses are read after the last step.  With ``--compiled`` PyTorch's side runs once more, under
``torch.compile``.  With ``--flax`` there is a third side: the network in flax, under ``jit`` over a mesh of the GPUs,
with prepared batches in host memory.

The sides run one after the other, in separate processes.  The first program for each placement of the images is
compiled; for other numbers of GPUs it is read from a compilation cache of this run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from time import perf_counter
from typing import Any

from benchmarks import make_parser
from benchmarks._measure import (
    SideError,
    Table,
    format_duration,
    print_criterion,
    print_heading,
    require_gpus,
    run_side,
)

#: Settings of all sides, of which ``images`` for each GPU are there to pick from, and those with ``--cpu``.
SETTINGS = {"depth": 50, "width": 64, "size": 224, "images": 1024, "batch_size": 64, "steps": 60, "warm": 20}
SMALL_SETTINGS = {"depth": 14, "width": 8, "size": 32, "images": 16, "batch_size": 2, "steps": 2, "warm": 1}
#: Blocks of each stage by depth of the network, as in demos/resnet.
BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
#: JAX's name of each precision, and the required speed relative to PyTorch.
PRECISIONS = {"tf32": ("tensorfloat32", 1.1), "bfloat16": ("bfloat16", 1.2)}
#: Required speed relative to PyTorch under torch.compile.
BESIDE_COMPILED = 1.15
#: XLA's flag for a number of devices on the CPU.
_HOST_DEVICES = "--xla_force_host_platform_device_count"


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser("gpu_resnet", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 1, 2 and 4, as far as there are)")
    add("--precision", nargs="+", choices=PRECISIONS, default=["tf32"], help="of products (default: tf32)")
    add(
        "--where",
        nargs="+",
        choices=("host", "gpu", "files"),
        default=["host", "gpu"],
        help="where images are (default: host and GPUs; files: images are read by loaders, and compared with the host)",
    )
    add("--loaders", type=int, default=8, metavar="N", help="that read files (%(default)s)")
    add("--batch-size", type=int, metavar="N", help="images a step for each GPU (64)")
    add("--cpu", action="store_true", help="a small network on CPU cores, to try the benchmark")
    add("--limit", type=float, default=240, metavar="S", help="seconds for each process (%(default)s)")
    add("--compiled", action="store_true", help="compare with PyTorch under torch.compile, too")
    add("--flax", action="store_true", help="compare with flax on a mesh, too")
    add("--exchange", choices=("bfloat16",), help="how our gradients travel (as they are)")
    add("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch and torchvision")
    return parser.parse_args()


def make_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of all sides, except for those that differ between rows."""
    settings: dict[str, Any] = {**(SMALL_SETTINGS if options.cpu else SETTINGS), "classes": 1000, "compiled": False}
    settings |= {name: getattr(options, name) for name in ("where", "loaders", "exchange")}
    settings |= {"device": "cpu" if options.cpu else "gpu", "blocks": BLOCKS[settings["depth"]]}
    return settings if options.batch_size is None else {**settings, "batch_size": options.batch_size}


class SpeedTable:
    """Table of speeds, printed row by row, and goals, printed at the end."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._goals: list[tuple[str, float, str, float | None, float | None]] = []
        self.remarks: list[str] = []
        self._table = Table(
            {"": 8, "images": 6, "GPUs": 4, "ours": 9, "DDP": 9, "ours/DDP": 8, "scaling": 7, "DDP's": 7}
            | {"compiled": 9, "ours/it": 7, "flax": 9, "ours/flax": 9}
        )

    def add_row(
        self,
        precision: str,
        placement: str,
        n: int,
        images: int,
        result: Any,
        ddp: Any,
        others: dict[str, Any],
        is_cold: bool,
    ) -> None:
        """Print a row; `images` is their number per step, `others` has the optional sides "compiled" and "flax"."""
        ours, theirs = (side["results"][placement] for side in (result, ddp))
        speed = self._speeds[precision, placement, n] = images / ours["seconds"], images / theirs["seconds"]
        ratio = speed[0] / speed[1]
        speeds = {name: images / side["results"][placement]["seconds"] for name, side in others.items()}
        single_gpu_speed = self._speeds.get((precision, placement, 1))
        scaling = (
            [s / (n * s1) for s, s1 in zip(speed, single_gpu_speed, strict=True)]
            if single_gpu_speed and n > 1
            else None
        )
        self._table.print_row(
            *(precision, placement, str(n), f"{speed[0]:,.0f}/s", f"{speed[1]:,.0f}/s", f"{ratio:.3f}"),
            *([f"{share:.1%}" for share in scaling] if scaling else ["", ""]),
            *(
                text
                for name in ("compiled", "flax")
                for text in (
                    [f"{speeds[name]:,.0f}/s", f"{speed[0] / speeds[name]:.3f}"] if name in speeds else ["", ""]
                )
            ),
        )
        label = f"{precision}, images from the {placement}, n = {n}"
        self._goals.append((f"{label}: beside DDP", ratio, " times", None, PRECISIONS[precision][1]))
        if "compiled" in speeds:
            ratio = speed[0] / speeds["compiled"]
            self._goals.append((f"{label}: beside compiled DDP", ratio, " times", None, BESIDE_COMPILED))
        if scaling:
            self._goals.append((f"{label}: scaling", 100 * scaling[0], " %", None, 97))
        if is_cold:
            self._goals.append((f"{label}: first step, compiled anew", ours["first"], " s", 120, None))
        losses = f"{ours['loss']:.3f}, DDP {theirs['loss']:.3f}"
        self.remarks.append(f"{label}: first step {format_duration(ours['first'])}; losses at the end {losses}")

    def add_loading(self, precision: str, n: int, images: int, result: Any) -> None:
        """Store the speed with rows from files, relative to rows on the host."""
        plain, loaded = (images / result["results"][placement]["seconds"] for placement in ("host", "files"))
        label = f"{precision}, images from files, n = {n}"
        self.remarks.append(
            f"{label}: {loaded:,.0f}/s, and {plain:,.0f}/s from the host without loading; "
            f"the middle step waits {format_duration(result['wait'])} for its rows"
        )
        self._goals.append((f"{label}: beside those on the host", 100 * loaded / plain, " %", None, 97))

    def print_summary(self) -> None:
        """Print remarks, and each goal with PASS or FAIL."""
        print("", *self.remarks, "", sep="\n")
        for label, figure, unit, most, least in self._goals:
            print_criterion(label, figure, unit, at_most=most, at_least=least)


def main() -> None:
    """Run the benchmark."""
    options = parse_options()
    if "files" in options.where and "host" not in options.where:
        raise SystemExit("--where files: expected host with it, to compare with")
    n_available = 2 if options.cpu else require_gpus(None)
    counts = options.ranks or [n for n in (1, 2, 4) if n <= n_available]
    common = make_settings(options)
    batch_size, size = common["batch_size"], common["size"]
    print_heading(f"a training step of a ResNet-{common['depth']}, {size}x{size}, {batch_size} a GPU")
    start = perf_counter()
    table = SpeedTable()
    for precision in options.precision:
        with tempfile.TemporaryDirectory() as cache:
            environment = {
                "JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[precision][0],
                "JAX_COMPILATION_CACHE_DIR": cache,
                **({"JAX_PLATFORMS": "cpu"} if options.cpu else {}),
            }
            is_cold = True
            for n in counts:
                settings = {**common, "precision": precision, "n": n}
                try:
                    result = run_side(["_resnet"], settings, options.limit, **environment)
                    settings = {**settings, "where": [placement for placement in options.where if placement != "files"]}
                    ddp = run_side(["_ddp"], settings, options.limit, options.torch_python)
                    others = {}
                    if options.compiled:
                        compiled = {**settings, "compiled": True}
                        others["compiled"] = run_side(["_ddp"], compiled, options.limit, options.torch_python)
                    if options.flax:
                        devices = {"XLA_FLAGS": f"{_HOST_DEVICES}={n}"} if options.cpu else {}
                        others["flax"] = run_side(["_mesh"], settings, options.limit, **environment, **devices)
                except SideError as failure:
                    print(f"{precision}, n = {n}: {failure}", flush=True)
                    continue
                table.remarks.append(
                    f"{result['title']}, {ddp['title']}: {format_duration(result['built'])} to start and build ours"
                )
                if "files" in options.where:
                    table.add_loading(precision, n, n * batch_size, result)
                for placement in settings["where"]:
                    table.add_row(precision, placement, n, n * batch_size, result, ddp, others, is_cold)
                is_cold = False
    table.print_summary()
    print(f"\n{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
