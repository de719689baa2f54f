"""Our side of `benchmarks.gpu_resnet` and `gpu_zoo`: a network of demos/resnet or demos/zoo, trained by Synkhronos.

Run as a script of its own, with the settings as JSON in its only argument, as PyTorch's side is, so that each has the
GPUs to itself and compiles what it needs.  It prints what it measured, as JSON.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import synkhronos.compat  # noqa: F401 - before Lasagne

# isort: split
import pytensor

import synkhronos as synk
from benchmarks._training import time_steps
from synkhronos.loading import CropMirror, Loader, npy
from synkhronos.training import make_train_function, updates

_DEMOS = Path(__file__).resolve().parents[1] / "demos"
sys.path[1:1] = [str(_DEMOS), str(_DEMOS / "resnet"), str(_DEMOS / "zoo")]


class Network(NamedTuple):
    """Variables of a training step."""

    loss: Any
    params: list[Any]
    x: Any
    y: Any
    average_updates: Any


def network(settings: dict[str, Any]) -> Network:
    """Return the zoo's network named in the settings, or a ResNet of their size."""
    if "network" not in settings:
        from network import build

        net = build(settings["blocks"], settings["width"], settings["size"], settings["classes"])
        return Network(net.loss, net.params, net.x, net.y, net.average_updates)
    config = {"side": settings["size"], "stored": settings["size"], "classes": settings["classes"], "images": 1}
    kind = getattr(importlib.import_module(settings["network"].lower()), settings["network"])
    model = kind({"rank": 0, "size": 1, "seed": 0, "batch_size": 1, **config})
    x, y = model.inputs
    return Network(model.loss, model.trained, x, y, model.averages)


def batches_of(rng: np.random.Generator, rows: int, size: int) -> Iterator[np.ndarray]:
    """Yield an endless sequence of batches of shuffled rows."""
    while True:
        order = rng.permutation(rows)
        for start in range(0, rows - size + 1, size):
            yield order[start : start + size]


class Side:
    """Network with images on the host, on the GPUs or in files.

    Parameters
    ----------
    settings : dict
        As `benchmarks.gpu_resnet` writes them.
    """

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        self._rng = np.random.default_rng(0)
        self._net = network(settings)
        self._folder = tempfile.TemporaryDirectory()
        #: Seconds that each step on rows from files has waited for them.
        self.waits: list[float] = []
        self.parameters = sum(param.get_value(borrow=True).size for param in self._net.params)

    def _step(self, held: list[Any] | None = None) -> Callable[..., Any]:
        """Return a training function."""
        net = self._net
        return make_train_function(
            net.loss,
            net.params,
            net.x,
            net.y,
            updates.momentum,
            sliceable_shareds=held,
            extra_updates=net.average_updates,
            exchange=self._settings["exchange"],
            learning_rate=0.01,
        )

    def _images(self, count: int) -> tuple[Any, Any]:
        """Return `count` images and labels, as Data objects."""
        size = self._settings["size"]
        images = synk.data(dtype="uint8", shape=(count, 3, size, size))
        for i in range(count):
            images[i] = self._rng.integers(256, size=(3, size, size), dtype=np.uint8)
        return images, synk.data(self._rng.integers(self._settings["classes"], size=count, dtype=np.int32))

    def host(self) -> Callable[[], Any]:
        """Return a step on shuffled rows of Data objects."""
        n, each = self._settings["n"], self._settings["batch_size"]
        data = self._images(n * self._settings["images"])
        step = self._step()
        batches = batches_of(self._rng, len(data[1]), n * each)
        return lambda: step(*data, batch=next(batches))

    def gpu(self) -> Callable[[], Any]:
        """Return a step on shuffled rows of variables on the GPUs."""
        n, each, count = (self._settings[name] for name in ("n", "batch_size", "images"))
        held = [pytensor.shared(np.zeros((1, 1, 1, 1), np.uint8), "x"), pytensor.shared(np.zeros(1, np.int32), "y")]
        step = self._step(held)
        images, labels = self._images(n * count)
        synk.distribute()
        synk.scatter(held, [images, labels])
        images.free_memory()
        batches = batches_of(self._rng, count, each)
        return lambda: step(batch_s=next(batches))

    def files(self) -> Callable[[], Any]:
        """Return a step on rows that loaders read from files during the steps, and crop."""
        n, each, size = (self._settings[name] for name in ("n", "batch_size", "size"))
        count = n * self._settings["images"]
        folder = Path(self._folder.name)
        images = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, 3, size + 32, size + 32))
        for i in range(count):
            images[i] = self._rng.integers(256, size=images.shape[1:], dtype=np.uint8)
        images.flush()
        np.save(folder / "y.npy", self._rng.integers(self._settings["classes"], size=count, dtype=np.int32))
        loader = Loader(
            [npy(folder / "x.npy"), npy(folder / "y.npy")],
            augment=CropMirror(size, mirror=True),
            processes=self._settings["loaders"],
            vars=[self._net.x, self._net.y],
        )
        step = self._step()
        batches = (rows for epoch in itertools.count() for rows in loader.epoch(epoch, n * each, whole=True))

        def take() -> Any:
            start = perf_counter()
            batch = next(batches)
            self.waits.append(perf_counter() - start)
            x_data, y_data = loader.data
            return step(x_data, y_data, batch=batch)

        return take

    def measure(self, where: str) -> tuple[float, float, float]:
        """Return the first step's seconds, the median seconds of a step, and the last loss."""
        step = {"host": self.host, "gpu": self.gpu, "files": self.files}[where]()
        return time_steps(step, self._settings["warm"], self._settings["rounds"], self._settings["steps"])


def main() -> None:
    """Measure, and print the result as JSON."""
    settings = json.loads(sys.argv[1])
    start = perf_counter()
    pytensor.config.floatX = "float32"
    gpu = settings["device"] == "gpu"
    if not gpu:
        pytensor.config.mode = "JAX"
    synk.fork(settings["n"], use_gpu=gpu)
    side = Side(settings)
    built = perf_counter() - start
    results = {where: side.measure(where) for where in settings["where"]}
    title = f"Synkhronos, PyTensor {pytensor.__version__}"
    found = {"title": title, "built": built, "results": results, "parameters": side.parameters}
    found["wait"] = median(side.waits) if side.waits else None
    print(json.dumps(found), flush=True)
    synk.close()


if __name__ == "__main__":
    main()
