"""Throughput of loaders, and the time that reading from files adds to a training loop.

Made-up photographs, as JPEG files and as rows of .npy files.  First images a second of loaders alone: a picture is
read, brought to 256 x 256, cropped at random to 224 x 224, mirrored, and written as bytes where all ranks see it.
Beside it the same in one process, without loaders.  Then steps of a small network: on rows that are in memory already,
and on rows that loaders read meanwhile, in turn.  Where ranks compute on the cores that loaders need, too, steps take
longer for it; the bar is about the time in which ranks wait.  The last columns are the time of cores that a step takes:
of the ranks, on either rows, and of the loaders.  What else runs on the machine lengthens steps, and these hardly.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, graph_library, heading, interleaved, ranks
from synkhronos.loading import CropMirror, Images, Loader, npy
from synkhronos.loading.augment import make_generator
from synkhronos.training import make_train_function
from synkhronos.training.updates import sgd


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--images", type=int, default=256, help="photographs (%(default)s)")
    add("--batch-size", type=int, default=32, metavar="N", help="rows of a batch (%(default)s)")
    add("--processes", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of loaders (1 and 2)")
    add("--batches", type=int, default=24, help="timed batches in each of three turns (%(default)s)")
    add("--ranks", type=int, default=1, help="that train (%(default)s)")
    add("--hidden", type=int, default=64, help="units of the network, which say how long a step takes (%(default)s)")
    return parser.parse_args()


def photographs(folder: Path, count: int) -> tuple[Images, list[Any]]:
    """Write photographs; return them as JPEG files, and as rows of .npy files."""
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


def endless(loader: Loader, size: int) -> Iterator[Any]:
    """Go through the batches of all epochs."""
    return itertools.chain.from_iterable(loader.epoch(epoch, size, whole=True) for epoch in itertools.count())


def alone(sources: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure loaders by themselves."""
    table = Table({"": 8, "loaders": 8, "images": 10, "a process": 10, "ratio": 6})
    augment = CropMirror(224, mirror=True)
    pictures = sources["JPEG"]
    for name, source in sources.items():
        read: Callable[[int], Any] = (
            source.__getitem__ if source is pictures else lambda row, s=source: tuple(a[row] for a in s)  # type: ignore[misc]
        )
        target = np.empty((options.batch_size, 3, 224, 224), np.uint8)
        for processes in options.processes:
            loader = Loader(source, augment=augment, processes=processes)
            batches = endless(loader, options.batch_size)
            order = itertools.cycle(np.random.default_rng(0).permutation(options.images).tolist())

            def plain() -> None:
                for i in range(options.batch_size):
                    row = next(order)  # noqa: B023
                    target[i], _ = augment(read(row), make_generator(0, 0, row))  # noqa: B023

            for _ in range(2 * loader.depth):
                next(batches)  # the loaders have begun, and the ring is full no more
            times: dict[str, list[float]] = {"loaders": [], "process": []}
            for _ in range(3):
                for _ in range(loader.depth):
                    next(batches)
                start = perf_counter()
                for _ in range(options.batches):
                    next(batches)
                times["loaders"].append((perf_counter() - start) / options.batches)
                loader.close()  # or they would read on beside the other side
                start = perf_counter()
                for _ in range(max(1, options.batches // 4)):
                    plain()
                times["process"].append((perf_counter() - start) / max(1, options.batches // 4))
                batches = endless(loader, options.batch_size)
                for _ in range(2 * loader.depth):
                    next(batches)
            loader.close()
            ours, theirs = (options.batch_size / median(times[side]) for side in ("loaders", "process"))
            table.row(name, str(processes), f"{ours:,.0f}/s", f"{theirs:,.0f}/s", f"{ours / theirs:.2f}")


def processor_time(loader: Loader, step: Callable[[], None], count: int) -> tuple[float, float]:
    """Return the seconds of cores that a step takes of the ranks, and of the loaders."""

    def ours() -> float:
        return sum(synk.run(_seconds))

    def theirs() -> float:
        return sum(_of_process(pid) for pid in loader._pool.pids) if loader._pool else 0.0

    before = ours(), theirs()
    for _ in range(count):
        step()
    return (ours() - before[0]) / count, (theirs() - before[1]) / count


def _seconds(worker: synk.Worker) -> float:
    return process_time()


def _of_process(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def training(sources: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure steps with and without loading."""
    library, tensor = graph_library()
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
    held = synk.data(shape=(options.images, 3, 224, 224), dtype="uint8"), synk.data(sources["JPEG"].labels)
    for i in range(options.images):
        held[0][i] = sources["JPEG"][i][0][:, :224, :224]
    parts = options.images // options.batch_size
    orders = (rows for _ in itertools.count() for rows in np.array_split(rng.permutation(options.images), parts))

    def in_memory() -> None:
        train(*held, batch=next(orders))

    in_memory()
    print()
    columns = {"": 8, "step": 10, "with loading": 12, "of it waiting": 13, "ratio": 6}
    table = Table({**columns, "cores' time": 11, "then": 10, "loaders'": 10})
    bars = []
    for name, source in sources.items():
        processes = max(options.processes)
        loader = Loader(source, augment=augment, processes=processes, vars=[x, y])
        batches = endless(loader, options.batch_size)

        def loaded() -> None:
            batch = next(batches)  # noqa: B023
            images, labels = loader.data  # noqa: B023
            train(images, labels, batch=batch)

        loaded()
        # Turns of many steps each: loaders fill their ring beside the other side's first steps, and then rest.
        waited = loader.waited
        times = interleaved({"memory": in_memory, "files": loaded}, 3, options.batches, warm=2 * loader.depth)
        waiting = (loader.waited - waited) / (3 * (options.batches + 2 * loader.depth))
        plain, ours = (sum(times[side]) / len(times[side]) for side in ("memory", "files"))
        by_itself, _ = processor_time(loader, in_memory, options.batches)
        beside, reading = processor_time(loader, loaded, options.batches)
        loader.close()
        row = [duration(plain), duration(ours), duration(waiting), f"{plain / ours:.3f}"]
        table.row(name, *row, *map(duration, (by_itself, beside, reading)))
        bars.append((f"{name}: of a step's time, waiting for rows", 100 * waiting / ours))
    for what, share in bars:
        bar(what, share, " %", most=3)


def main() -> None:
    """Run the benchmark."""
    options = parse()
    heading(f"Loaders: {options.images} photographs, batches of {options.batch_size}, {options.ranks} ranks that train")
    with tempfile.TemporaryDirectory() as folder, ranks(options.ranks):
        jpeg, rows = photographs(Path(folder), options.images)
        sources = {"JPEG": jpeg, ".npy": rows}
        alone(sources, options)
        training(sources, options)


if __name__ == "__main__":
    main()
