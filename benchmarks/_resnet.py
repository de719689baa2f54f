"""Synkhronos' side of `benchmarks.gpu_resnet` and `gpu_zoo`: a network of demos/resnet or demos/zoo.

A script of its own, like PyTorch's side, so that each side uses the GPUs alone and compiles its own programs.  Its only
argument is the settings as JSON; it prints the results as JSON.
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
from benchmarks._training import measure_steps
from synkhronos.loading import CropMirror, Loader, npy
from synkhronos.training import make_train_function, updates

#: The rule of the other sides: weights decay by an addend of the gradient, and the loss has no penalty.
WEIGHT_DECAY_MOMENTUM = updates.chain(updates.add_decayed_weights(1e-4), updates.momentum)

_DEMOS = Path(__file__).resolve().parents[1] / "demos"
sys.path[1:1] = [str(_DEMOS), str(_DEMOS / "resnet"), str(_DEMOS / "zoo")]


class Network(NamedTuple):
    """Variables of a training step."""

    loss: Any
    params: list[Any]
    x: Any
    y: Any
    average_updates: Any


def build_network(settings: dict[str, Any]) -> Network:
    """Return the network of the zoo that the settings name, else a ResNet of the settings' size."""
    if "network" not in settings:
        from network import build_network as build_resnet

        blocks, width, size, n_classes = (settings[name] for name in ("blocks", "width", "size", "classes"))
        net = build_resnet(blocks, width, size, n_classes, weight_decay=0.0)
        return Network(net.loss, net.params, net.x, net.y, net.average_updates)
    config = {"side": settings["size"], "stored": settings["size"], "classes": settings["classes"], "images": 1}
    kind = getattr(importlib.import_module(settings["network"].lower()), settings["network"])
    model = kind({"rank": 0, "size": 1, "seed": 0, "batch_size": 1, **config})
    x, y = model.inputs
    return Network(model.loss, model.trainable_params, x, y, model.averages)


def shuffle_batches(rng: np.random.Generator, rows: int, size: int) -> Iterator[np.ndarray]:
    """Yield an endless sequence of batches of shuffled rows."""
    while True:
        order = rng.permutation(rows)
        for start in range(0, rows - size + 1, size):
            yield order[start : start + size]


class SynkhronosTrainer:
    """Network with images on the host, on the GPUs or in files.

    Parameters
    ----------
    settings : dict
        Settings of `benchmarks.gpu_resnet`.
    """

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        self._rng = np.random.default_rng(0)
        self._net = build_network(settings)
        self._folder = tempfile.TemporaryDirectory()
        #: Seconds that each step on rows from files waited for its rows.
        self.waits: list[float] = []
        self.parameters = sum(param.get_value(borrow=True).size for param in self._net.params)

    def _make_step(self, device_arrays: list[Any] | None = None) -> Callable[..., Any]:
        """Return a training function."""
        net = self._net
        return make_train_function(
            net.loss,
            net.params,
            net.x,
            net.y,
            updates.momentum if "network" in self._settings else WEIGHT_DECAY_MOMENTUM,
            sliceable_shareds=device_arrays,
            extra_updates=net.average_updates,
            exchange_dtype=self._settings["exchange"],
            learning_rate=0.01,
        )

    def _make_images(self, count: int) -> tuple[Any, Any]:
        """Return `count` images and labels, as Data objects."""
        size = self._settings["size"]
        images = synk.data(dtype="uint8", shape=(count, 3, size, size))
        for i in range(count):
            images[i] = self._rng.integers(256, size=(3, size, size), dtype=np.uint8)
        return images, synk.data(self._rng.integers(self._settings["classes"], size=count, dtype=np.int32))

    def _make_host_step(self) -> Callable[[], Any]:
        """Return a step on shuffled rows of Data objects."""
        n, batch_size = self._settings["n"], self._settings["batch_size"]
        data = self._make_images(n * self._settings["images"])
        step = self._make_step()
        batches = shuffle_batches(self._rng, len(data[1]), n * batch_size)
        return lambda: step(*data, batch=next(batches))

    def _make_gpu_step(self) -> Callable[[], Any]:
        """Return a step on shuffled rows of variables on the GPUs."""
        n, batch_size, count = (self._settings[name] for name in ("n", "batch_size", "images"))
        device_arrays = [
            pytensor.shared(np.zeros((1, 1, 1, 1), np.uint8), "x"),
            pytensor.shared(np.zeros(1, np.int32), "y"),
        ]
        step = self._make_step(device_arrays)
        images, labels = self._make_images(n * count)
        synk.distribute()
        synk.scatter(device_arrays, [images, labels])
        images.free_memory()
        batches = shuffle_batches(self._rng, count, batch_size)
        return lambda: step(batch_s=next(batches))

    def _make_file_step(self) -> Callable[[], Any]:
        """Return a step on rows that loaders read from files during the steps, and crop."""
        n, batch_size, size = (self._settings[name] for name in ("n", "batch_size", "size"))
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
        step = self._make_step()
        batches = (rows for epoch in itertools.count() for rows in loader.epoch(epoch, n * batch_size, drop_last=True))

        def take_step() -> Any:
            start = perf_counter()
            batch = next(batches)
            self.waits.append(perf_counter() - start)
            x_data, y_data = loader.data
            return step(x_data, y_data, batch=batch)

        return take_step

    def measure(self, placement: str) -> dict[str, Any]:
        """Measure steps on images that are on the host, on the GPUs or in files."""
        step = {"host": self._make_host_step, "gpu": self._make_gpu_step, "files": self._make_file_step}[placement]()
        return measure_steps(step, self._settings)


def main() -> None:
    """Measure, and print the result as JSON."""
    settings = json.loads(sys.argv[1])
    start = perf_counter()
    pytensor.config.floatX = "float32"
    on_gpu = settings["device"] == "gpu"
    if not on_gpu:
        pytensor.config.mode = "JAX"
    synk.fork(settings["n"], use_gpu=on_gpu)
    trainer = SynkhronosTrainer(settings)
    built = perf_counter() - start
    results = {placement: trainer.measure(placement) for placement in settings["where"]}
    title = f"Synkhronos, PyTensor {pytensor.__version__}"
    report = {"title": title, "built": built, "results": results, "parameters": trainer.parameters}
    report["wait"] = median(trainer.waits) if trainer.waits else None
    print(json.dumps(report), flush=True)
    synk.close()


if __name__ == "__main__":
    main()
