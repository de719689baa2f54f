"""Speed of training of a ResNet-50, beside PyTorch.

The Lasagne network of demos/resnet, through `synkhronos.compat`, beside torchvision's under DistributedDataParallel:
made-up images, 64 for each GPU, gradient step, all-reduce and momentum update, on 1, 2, 4, ... GPUs.  Once images come
from the host, ours by shuffled lists of indexes from Data objects, PyTorch's from batches that lie ready in page-locked
memory; once they are on the GPUs already.  Losses are read after the last step.  With ``--compiled`` PyTorch's side
runs once more, under ``torch.compile``.  With ``--flax`` there is a third side: the network in flax, under ``jit`` over
a mesh of the GPUs, whose batches lie ready in host memory, too.

Each side runs in processes of its own, one after the other.  The first program for each place of the images is compiled
anew; those for other numbers of GPUs find it in a cache that this run alone uses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks._measure import Failed, Table, bar, duration, gpus, heading, run_alone

#: Blocks of each stage, by the depth that a network is called after; those of demos/resnet.
BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
#: JAX's name of each precision, and the required speed relative to PyTorch.
PRECISIONS = {"tf32": ("tensorfloat32", 1.1), "bfloat16": ("bfloat16", 1.2)}
#: Required speed relative to PyTorch under torch.compile.
BESIDE_COMPILED = 1.15
#: XLA's flag for a number of devices on the CPU.
_HOST_DEVICES = "--xla_force_host_platform_device_count"


def call(module: str, python: str, settings: dict[str, Any], environment: dict[str, str], limit: float) -> Any:
    """Run one side in a process of its own, and return what it measured.

    Parameters
    ----------
    module : str
        Its module in this package.
    python : str
        Path of the Python that runs it.
    settings : dict
        Settings of the side.
    environment : dict
        Variables beside those of this process.
    limit : float
        Seconds after which it, and all that it started, is ended.

    Returns
    -------
    dict
        ``title``, and ``results``: for each place first step's seconds, seconds of a step, and the loss.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [python, "-m", f"benchmarks.{module}", json.dumps(settings)]
    return json.loads(run_alone(command, limit, PYTHONPATH=path, **environment).splitlines()[-1])


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_resnet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    add("--steps", type=int, default=60, help="timed steps in each of three rounds (%(default)s)")
    add("--warm", type=int, default=20, help="steps before these (%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="images a step for each GPU (%(default)s)")
    add("--images", type=int, default=1024, metavar="N", help="images for each GPU, to pick from (%(default)s)")
    add("--depth", type=int, choices=BLOCKS, default=50, help="of the network (%(default)s)")
    add("--width", type=int, default=64, metavar="N", help="filters of its first layer (%(default)s)")
    add("--size", type=int, default=224, metavar="N", help="height and width of the images (%(default)s)")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu tries the benchmark itself (%(default)s)")
    add("--limit", type=float, default=240, metavar="S", help="seconds for each process (%(default)s)")
    add("--compiled", action="store_true", help="compare with PyTorch under torch.compile, too")
    add("--flax", action="store_true", help="compare with flax on a mesh, too")
    add("--exchange", choices=("bfloat16",), help="how our gradients travel (as they are)")
    add("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch and torchvision")
    return parser.parse_args()


def settings_for(options: argparse.Namespace, precision: str, n: int) -> dict[str, Any]:
    """Return the settings of both sides."""
    same = ("steps", "warm", "batch_size", "images", "width", "size", "where", "device", "loaders")
    return {
        **{name: getattr(options, name) for name in same},
        "n": n,
        "precision": precision,
        "blocks": BLOCKS[options.depth],
        "classes": 1000,
        "rounds": 3,
        "exchange": options.exchange,
        "compiled": False,
    }


class Report:
    """Printer of speeds, row by row, and of goals at the end."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._bars: list[tuple[str, float, str, float | None, float | None]] = []
        self._remarks: list[str] = []
        self._table = Table(
            {"": 8, "images": 6, "GPUs": 4, "ours": 9, "DDP": 9, "ours/DDP": 8, "scaling": 7, "DDP's": 7}
            | {"compiled": 9, "ours/it": 7, "flax": 9, "ours/flax": 9}
        )

    def add(
        self,
        precision: str,
        where: str,
        n: int,
        images: int,
        ours: Any,
        ddp: Any,
        others: dict[str, Any],
        is_cold: bool,
    ) -> None:
        """Print a row; `images` are those of a step, `others` has the sides "compiled" and "flax", if asked for."""
        first, ours_step, loss = ours["results"][where]
        _, ddp_step, ddp_loss = ddp["results"][where]
        speed = self._speeds[precision, where, n] = images / ours_step, images / ddp_step
        ratio = speed[0] / speed[1]
        beside = {name: images / found["results"][where][1] for name, found in others.items()}
        one = self._speeds.get((precision, where, 1))
        scaling = [s / (n * s1) for s, s1 in zip(speed, one, strict=True)] if one and n > 1 else None
        self._table.row(
            *(precision, where, str(n), f"{speed[0]:,.0f}/s", f"{speed[1]:,.0f}/s", f"{ratio:.3f}"),
            *([f"{share:.1%}" for share in scaling] if scaling else ["", ""]),
            *(
                text
                for name in ("compiled", "flax")
                for text in (
                    [f"{beside[name]:,.0f}/s", f"{speed[0] / beside[name]:.3f}"] if name in beside else ["", ""]
                )
            ),
        )
        label = f"{precision}, images from the {where}, n = {n}"
        self._bars.append((f"{label}: beside DDP", ratio, " times", None, PRECISIONS[precision][1]))
        if "compiled" in beside:
            ratio = speed[0] / beside["compiled"]
            self._bars.append((f"{label}: beside compiled DDP", ratio, " times", None, BESIDE_COMPILED))
        if scaling:
            self._bars.append((f"{label}: scaling", 100 * scaling[0], " %", None, 97))
        if is_cold:
            self._bars.append((f"{label}: first step, compiled anew", first, " s", 120, None))
        losses = f"{loss:.3f}, the penalty of large weights included, DDP {ddp_loss:.3f} without"
        self._remarks.append(f"{label}: first step {duration(first)}; losses at the end {losses}")

    def add_loading(self, precision: str, n: int, images: int, ours: Any) -> None:
        """Store the speed with rows from files, relative to rows on the host."""
        plain, loaded = (images / ours["results"][where][1] for where in ("host", "files"))
        label = f"{precision}, images from files, n = {n}"
        self._remarks.append(
            f"{label}: {loaded:,.0f}/s, and {plain:,.0f}/s from the host without loading; "
            f"the middle step waits {duration(ours['wait'])} for its rows"
        )
        self._bars.append((f"{label}: beside those on the host", 100 * loaded / plain, " %", None, 97))

    def remark(self, text: str) -> None:
        """Store a line to print at the end."""
        self._remarks.append(text)

    def end(self) -> None:
        """Print remarks and bars."""
        print("", *self._remarks, "", sep="\n")
        for what, figure, unit, most, least in self._bars:
            bar(what, figure, unit, most=most, least=least)


def main() -> None:
    """Run the benchmark."""
    options = parse()
    if "files" in options.where and "host" not in options.where:
        raise SystemExit("--where files: expected host with it, to compare with")
    there = gpus(None) if options.device == "gpu" else 2
    counts = options.ranks or [n for n in (1, 2, 4) if n <= there]
    heading(f"a training step of a ResNet-{options.depth}, {options.size}x{options.size}, {options.batch_size} a GPU")
    start = perf_counter()
    report = Report()
    for precision in options.precision:
        with tempfile.TemporaryDirectory() as cache:
            environment = {
                "JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[precision][0],
                "JAX_COMPILATION_CACHE_DIR": cache,
                **({} if options.device == "gpu" else {"JAX_PLATFORMS": "cpu"}),
            }
            is_cold = True
            for n in counts:
                settings = settings_for(options, precision, n)
                try:
                    ours = call("_resnet", sys.executable, settings, environment, options.limit)
                    settings = {**settings, "where": [where for where in options.where if where != "files"]}
                    ddp = call("_ddp", options.torch_python, settings, {}, options.limit)
                    others = {}
                    if options.compiled:
                        compiled = {**settings, "compiled": True}
                        others["compiled"] = call("_ddp", options.torch_python, compiled, {}, options.limit)
                    if options.flax:
                        devices = {} if options.device == "gpu" else {"XLA_FLAGS": f"{_HOST_DEVICES}={n}"}
                        others["flax"] = call("_mesh", sys.executable, settings, environment | devices, options.limit)
                except Failed as failure:
                    print(f"{precision}, n = {n}: {failure}", flush=True)
                    continue
                report.remark(f"{ours['title']}, {ddp['title']}: {duration(ours['built'])} to start and build ours")
                if "files" in options.where:
                    report.add_loading(precision, n, n * options.batch_size, ours)
                for where in settings["where"]:
                    report.add(precision, where, n, n * options.batch_size, ours, ddp, others, is_cold)
                is_cold = False
    report.end()
    print(f"\n{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
