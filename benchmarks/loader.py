"""Throughput of loaders, and the time that reading from files adds to a training loop.

Synthetic photographs, as JPEG files and as rows of .npy files.  The first table has images per second of loaders alone:
an image is read, resized to 256 x 256, cropped at random to 224 x 224, mirrored, and written to shared memory as bytes.
Loaders are compared with the same work in one process.

The second table has steps of a small network, on rows that are in memory and on rows that loaders read meanwhile, in
turn.  Ranks and loaders that share cores slow each other down; the limit is for the time that ranks wait.  The last
columns are the processor time of a step: of the ranks on rows in memory, of the ranks with loading, and of the loaders.
Other programs on the machine change it less than the time of a step.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
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
    read_cpu_seconds,
    time_interleaved,
)
from synkhronos.loading import CropMirror, Images, Loader, npy
from synkhronos.loading.augment import make_row_generator
from synkhronos.training import make_train_function
from synkhronos.training.updates import sgd


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser("loader", __doc__)
    add = parser.add_argument
    add("--images", type=int, default=256, help="photographs (%(default)s)")
    add("--batch-size", type=int, default=32, metavar="N", help="rows of a batch (%(default)s)")
    add("--processes", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of loaders (1 and 2)")
    add("--batches", type=int, default=24, help="timed batches in each of three turns (%(default)s)")
    add("--ranks", type=int, default=1, help="that train (%(default)s)")
    add("--hidden", type=int, default=64, help="units of the network, which say how long a step takes (%(default)s)")
    return parser.parse_args()


def make_photographs(folder: Path, count: int) -> tuple[Images, list[Any]]:
    """Write photographs as JPEG files and as rows of .npy files; return sources of both."""
    from PIL import Image

    rng = np.random.default_rng(0)
    files, labels = [], rng.integers(10, size=count).tolist()
    rows = np.empty((count, 3, 256, 256), np.uint8)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(256, size=(24, 32, 3), dtype=np.uint8))
        grain = rng.integers(-12, 13, size=(375, 500, 3))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        files.append(folder / f"{i}.jpg")
        Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(files[-1], quality=90)
    pictures = Images(files, 256, labels)
    for i in range(count):
        rows[i] = pictures[i][0]
    np.save(folder / "x.npy", rows)
    np.save(folder / "y.npy", np.array(labels, np.int32))
    return pictures, [npy(folder / "x.npy"), npy(folder / "y.npy")]


def iterate_batches(loader: Loader, size: int) -> Iterator[Any]:
    """Return an iterator over the batches of an endless sequence of epochs."""
    return itertools.chain.from_iterable(loader.epoch(epoch, size, drop_last=True) for epoch in itertools.count())


def measure_loaders(sources: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure loaders without training."""
    table = Table({"": 8, "loaders": 8, "images": 10, "a process": 10, "ratio": 6})
    augment = CropMirror(224, mirror=True)
    pictures = sources["JPEG"]
    for name, source in sources.items():
        read_row: Callable[[int], Any] = (
            source.__getitem__ if source is pictures else lambda row, s=source: tuple(a[row] for a in s)  # type: ignore[misc]
        )
        target = np.empty((options.batch_size, 3, 224, 224), np.uint8)
        for processes in options.processes:
            loader = Loader(source, augment=augment, processes=processes)
            batches = iterate_batches(loader, options.batch_size)
            order = itertools.cycle(np.random.default_rng(0).permutation(options.images).tolist())

            def read_batch() -> None:
                for i in range(options.batch_size):
                    row = next(order)  # noqa: B023
                    target[i], _ = augment(read_row(row), make_row_generator(0, 0, row))  # noqa: B023

            for _ in range(2 * loader.depth):
                next(batches)  # until the loaders have started and the ring is not full
            times: dict[str, list[float]] = {"loaders": [], "process": []}
            for _ in range(3):
                for _ in range(loader.depth):
                    next(batches)
                start = perf_counter()
                for _ in range(options.batches):
                    next(batches)
                times["loaders"].append((perf_counter() - start) / options.batches)
                loader.close()  # otherwise they would read during the other side's turn
                start = perf_counter()
                for _ in range(max(1, options.batches // 4)):
                    read_batch()
                times["process"].append((perf_counter() - start) / max(1, options.batches // 4))
                batches = iterate_batches(loader, options.batch_size)
                for _ in range(2 * loader.depth):
                    next(batches)
            loader.close()
            loader_rate, process_rate = (options.batch_size / median(times[side]) for side in ("loaders", "process"))
            table.print_row(
                name,
                str(processes),
                f"{loader_rate:,.0f}/s",
                f"{process_rate:,.0f}/s",
                f"{loader_rate / process_rate:.2f}",
            )


def measure_core_seconds(loader: Loader, step: Callable[[], None], count: int) -> tuple[float, float]:
    """Return the processor time of a step in seconds: of the ranks, and of the loaders."""

    def read_ranks() -> float:
        return sum(synk.run(read_process_time))

    def read_loaders() -> float:
        return read_cpu_seconds(loader._pool.pids) if loader._pool else 0.0

    start = read_ranks(), read_loaders()
    for _ in range(count):
        step()
    return (read_ranks() - start[0]) / count, (read_loaders() - start[1]) / count


def read_process_time(context: synk.RankContext) -> float:
    """Return the processor time of a rank in seconds; `synkhronos.run` calls this on all ranks."""
    return process_time()


def measure_training(sources: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure steps with and without loading."""
    library, tensor = import_graph_library()
    x, y = tensor.tensor4("x", dtype="uint8"), tensor.ivector("y")
    rng = np.random.default_rng(0)
    width = 3 * 224 * 224
    first = library.shared(rng.normal(0, 0.01, (width, options.hidden)).astype("float32"), "first")
    second = library.shared(rng.normal(0, 0.1, (options.hidden, 10)).astype("float32"), "second")
    hidden = tensor.tanh(tensor.dot(x.reshape((x.shape[0], width)).astype("float32") / np.float32(255), first))
    scores = tensor.dot(hidden, second)
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs = shifted - tensor.log(tensor.exp(shifted).sum(axis=1, keepdims=True))
    loss = -logs[tensor.arange(y.shape[0]), y].mean()
    train = make_train_function(loss, [first, second], x, y, sgd, learning_rate=0.01)
    augment = CropMirror(224, mirror=True)
    arrays = synk.data(shape=(options.images, 3, 224, 224), dtype="uint8"), synk.data(sources["JPEG"].labels)
    for i in range(options.images):
        arrays[0][i] = sources["JPEG"][i][0][:, :224, :224]
    n_batches = options.images // options.batch_size
    orders = (rows for _ in itertools.count() for rows in np.array_split(rng.permutation(options.images), n_batches))

    def step_on_memory() -> None:
        train(*arrays, batch=next(orders))

    step_on_memory()
    print()
    columns = {"": 8, "step": 10, "with loading": 12, "of it waiting": 13, "ratio": 6}
    table = Table({**columns, "cores' time": 11, "then": 10, "loaders'": 10})
    bars = []
    for name, source in sources.items():
        processes = max(options.processes)
        loader = Loader(source, augment=augment, processes=processes, vars=[x, y])
        batches = iterate_batches(loader, options.batch_size)

        def step_on_files() -> None:
            batch = next(batches)  # noqa: B023
            images, labels = loader.data  # noqa: B023
            train(images, labels, batch=batch)

        step_on_files()
        # Long turns: loaders fill their ring during the first steps of the other side, and then sleep.
        waited_before = loader.wait_seconds
        times = time_interleaved(
            {"memory": step_on_memory, "files": step_on_files}, 3, options.batches, n_warmup=2 * loader.depth
        )
        waiting = (loader.wait_seconds - waited_before) / (3 * (options.batches + 2 * loader.depth))
        memory, files = (sum(times[side]) / len(times[side]) for side in ("memory", "files"))
        memory_core_time, _ = measure_core_seconds(loader, step_on_memory, options.batches)
        loading_core_time, loaders_core_time = measure_core_seconds(loader, step_on_files, options.batches)
        loader.close()
        row = [format_duration(memory), format_duration(files), format_duration(waiting), f"{memory / files:.3f}"]
        table.print_row(name, *row, *map(format_duration, (memory_core_time, loading_core_time, loaders_core_time)))
        bars.append((f"{name}: of a step's time, waiting for rows", 100 * waiting / files))
    for label, percent in bars:
        print_criterion(label, percent, " %", at_most=3)


def main() -> None:
    """Run the benchmark."""
    options = parse_options()
    print_heading(
        f"Loaders: {options.images} photographs, batches of {options.batch_size}, {options.ranks} ranks that train"
    )
    with tempfile.TemporaryDirectory() as folder, fork_ranks(options.ranks):
        jpeg, rows = make_photographs(Path(folder), options.images)
        sources = {"JPEG": jpeg, ".npy": rows}
        measure_loaders(sources, options)
        measure_training(sources, options)


if __name__ == "__main__":
    main()
