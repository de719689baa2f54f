"""JAX arrays: on the rank's own GPU, or in host memory where ranks compute on the CPU.

`Jax`
    The device.

`staging`
    From host memory to the GPU: page-locked shared memory, of which the GPU itself picks the rows.
`nccl`
    The communicator between GPUs.

Nothing here imports JAX before a rank needs it: a process that has started XLA can't be forked any more.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from synkhronos.devices.host import Selection, take
from synkhronos.ranks import Rank, SharedArray

if TYPE_CHECKING:
    from synkhronos.devices.jax.nccl import NcclCommunicator
    from synkhronos.devices.jax.staging import Part, Staging

#: What has to be importable to compute on GPUs: one of some modules, and what to install for it.
NEEDED = {
    ("jax",): "jax",
    ("jax_cuda13_plugin", "jax_cuda12_plugin"): "jax[cuda13] or jax[cuda12]",
    ("nccl.core",): "nccl4py",
    ("cuda.core",): "cuda-core",
}


class Jax:
    """JAX arrays.  One process has one device: the GPU to which its rank was bound, or else the CPU."""

    name = "jax"

    def __init__(self) -> None:
        self._place: str | None = None
        self._staging: Staging | None = None

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        """Whether this process was bound to a GPU."""
        return self._place is not None

    def places(self, size: int, root: int) -> list[str]:
        """Return for each rank which GPU it gets, as ``CUDA_VISIBLE_DEVICES`` names them."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(size)] if visible is None else [name.strip() for name in visible.split(",")]
        if self._place is not None and self._place in names:  # the master can't leave the GPU that it has started
            names.remove(self._place)
            names.insert(root, self._place)
        return names[:size]

    def bind(self, rank: Rank, place: str) -> None:
        """Make JAX see one GPU alone.

        Raises
        ------
        RuntimeError
            If JAX can't compute on it.
        """
        if self._place is not None:  # from an earlier fork: CUDA has been started, and keeps what it saw then
            return
        before = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")}
        os.environ["CUDA_VISIBLE_DEVICES"] = place
        os.environ.pop("JAX_PLATFORMS", None)
        try:
            devices = self._jax().devices()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        if devices[0].platform != "gpu":
            raise RuntimeError(
                f"JAX computes on {devices[0].platform!r} though GPU {place} is there: its CUDA plugin and the driver "
                "don't fit together, or jax_platforms is set; try `python -c 'import jax; print(jax.devices())'`"
            )
        self._place = place

    def _jax(self) -> Any:
        import jax

        jax.config.update("jax_enable_x64", True)  # as PyTensor needs it: dtypes mean what they say
        return jax

    @property
    def _numpy(self) -> Any:
        self._jax()
        import jax.numpy

        return jax.numpy

    # -- collectives -----------------------------------------------------------------------------------------

    def communicator(self, rank: Rank) -> NcclCommunicator:
        """Return the rank's communicator between GPUs, the same one each time."""
        communicator: NcclCommunicator | None = rank.store.get("nccl communicator")
        if communicator is None:
            from synkhronos.devices.jax.nccl import NcclCommunicator

            communicator = rank.store["nccl communicator"] = NcclCommunicator(rank, self.staging)
        return communicator

    def communicates(self, dtype: np.dtype) -> bool:
        """Whether the GPUs can combine arrays of a dtype among themselves; what they can't goes through host memory."""
        if not self.on_gpu:
            return False
        from synkhronos.devices.jax.nccl import DTYPES

        return dtype in DTYPES

    # -- arrays ----------------------------------------------------------------------------------------------

    def holds(self, value: Any) -> bool:
        """Whether it is a JAX array."""
        return type(value).__module__.startswith("jaxlib")

    def writable(self, value: Any) -> Any:
        """Return the value itself: a container's array is nobody else's, and collectives may write in it."""
        return value

    def written(self, value: Any) -> Any:
        """Return an array that was written in place, without what JAX remembers of its old content."""
        if getattr(value, "_npy_value", None) is None:
            return value
        make = self._jax().make_array_from_single_device_arrays
        return make(value.shape, value.sharding, [shard.data for shard in value.addressable_shards])

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array, of zeros: XLA has no other."""
        return self._numpy.zeros(shape, dtype).block_until_ready()

    def part(self, array: Any, start: int, shape: tuple[int, ...]) -> Part:
        """Return a run of an array's items, as the communicator takes it."""
        from synkhronos.devices.jax.staging import Part

        return Part(array, start, math.prod(shape))

    def contiguous(self, value: Any) -> Any:
        """Return the value: JAX arrays are contiguous."""
        return value

    def to_host(self, value: Any) -> np.ndarray:
        """Return the value as NumPy sees it, once it is computed."""
        return np.asarray(value)

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Return values on the host: all cross at once."""
        for value in values:
            if self.holds(value):
                value.copy_to_host_async()
        return [self.to_host(value) if self.holds(value) else value for value in values]

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as a JAX array, which nobody else holds."""
        # A copy: on the CPU, JAX may keep the very memory that it is given.
        return self._jax().device_put(np.array(array, order="C"))

    def load(self, rank: Rank, where: SharedArray, rows: Selection | None) -> Any:
        """Return rows of an array in shared memory (None: all of it) as a new array."""
        if self.on_gpu:
            return self.staging.load(rank, where, rows)
        view = where.view(rank.segments)
        return self.from_host(view if rows is None else take(view, rows))

    def apply(self, name: str, one: Any, other: Any) -> Any:
        """Return what NumPy's function of this name makes of two arrays."""
        return getattr(self._numpy, name)(one, other)

    def join(self, parts: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        return self._numpy.concatenate(list(parts))

    def array(self, value: Any) -> Any:
        """Return the value as a JAX array."""
        return value if self.holds(value) else self.from_host(np.asarray(value))

    # -- computing -------------------------------------------------------------------------------------------

    @property
    def staging(self) -> Staging:
        """What brings inputs to the GPU."""
        if self._staging is None:
            from synkhronos.devices.jax.staging import Staging

            self._staging = Staging(self._numpy.zeros)
        return self._staging

    def input(
        self, rank: Rank, kept: dict[Any, Any], key: Any, where: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory as an input for the next launch, in memory that is used again."""
        if self.on_gpu:
            return self.staging.input(rank, kept, key, where, rows)
        return self.load(rank, where, rows)

    def indexes(self, rank: Rank, kept: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a rank's own vector of indexes as an input for the next launch."""
        return self.staging.vector(kept, key, values) if self.on_gpu else values

    def launching(self) -> None:
        """Wait until the inputs of the launch that comes now have arrived."""
        if self._staging is not None:
            self._staging.arrive()

    def launched(self, token: Any) -> None:
        """Remember by what to tell that the last launch is done with its inputs."""
        if self._staging is not None:
            self._staging.launched(token)

    def wait(self, values: Sequence[Any]) -> None:
        """Wait until values have been computed."""
        for value in values:
            if self.holds(value):
                value.block_until_ready()


def started() -> bool:
    """Whether this process has started XLA, whose threads a forked process would lack and wait for."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def missing() -> list[str]:
    """Return what would have to be installed to compute on GPUs."""

    def there(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # of the package around it
            return False

    return [what for names, what in NEEDED.items() if not any(there(name) for name in names)]
