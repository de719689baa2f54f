"""Base class of the zoo's networks: settings, and a learning rate that falls at given epochs."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lasagne_tools.library import theano
from synkhronos.launcher import Model, SettingsError
from synkhronos.training import schedules

__all__ = ["ZooModel"]

if theano.config.mode == "Mode" and find_spec("jax"):
    # PyTensor's default: Numba compiles these networks for minutes, XLA for seconds.
    theano.config.mode = "JAX"
    # Harmless warnings of JAX mode: an assertion is skipped, float64 becomes float32, random streams are copied.
    warnings.filterwarnings("ignore", "Skipping Assert|Explicitly requested dtype|The RandomType SharedVariables")
# The graph libraries walk through a graph by recursion, and some of these are deeper than Python allows by default.
sys.setrecursionlimit(max(sys.getrecursionlimit(), 50_000))


class ZooModel(Model):
    """A network whose settings are attributes of its class, or set under ``config`` in a session.

    Attributes
    ----------
    settings : tuple of str
        The attributes that a session may set.
    falls : dict of float to float
        Factors of the learning rate by the epoch from which they apply.
    data : str
        A file or a folder.  By default data are synthetic, or those of the demos.
    """

    settings: tuple[str, ...] = ("batch_size", "n_epochs", "rate", "falls", "images")
    falls: dict[Any, float] = {}
    #: Number of synthetic images or texts; None for four batches of each rank.
    images: int | None = None

    def __init__(self, config: dict[str, Any]):
        for name, value in config.items():
            if name in self.settings:
                setattr(self, name, value)
            elif name not in ("rank", "size", "verbose", "seed", "mname", "data"):
                raise SettingsError(
                    f"config: {type(self).__name__} has no {name!r}: expected data, {', '.join(self.settings)}"
                )
        self.n_synthetic = self.images or 4 * self.batch_size * config["size"]
        super().__init__(config)

    @property
    def data_path(self) -> Path | None:
        """Path of the data, if the session sets one."""
        path = self.config.get("data")
        return Path(path).expanduser() if path else None

    def scale_lr(self, size: int) -> None:
        """Multiply the learning rate by the number of ranks."""
        self.rate *= size
        self.adjust_hyperp(self.epoch - 1)

    def adjust_hyperp(self, epoch: int) -> None:
        """Set the learning rate for the next epoch."""
        rate = schedules.steps(self.rate, {float(start): factor for start, factor in self.falls.items()})(epoch + 1)
        self.shared_lr.set_value(np.asarray(rate, self.shared_lr.type.dtype))
