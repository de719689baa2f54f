"""The base class of devices on GPUs."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from synkhronos.devices import cuda
from synkhronos.devices.cuda.gpu_context import GpuArrays, GpuContext
from synkhronos.devices.cuda.nccl import ItemRange, NcclCommunicator, NcclGroupCommunicator, to_nccl_dtype
from synkhronos.devices.cuda.staging import Staging
from synkhronos.devices.device import HostTransfers
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.devices.selection import Buffers
from synkhronos.patching import set_environment
from synkhronos.ranks import Rank
from synkhronos.variable_types import Array


class _GroupCommunicatorCache(dict[frozenset[int], NcclGroupCommunicator]):
    """A rank's communicators of groups, by the groups' members."""


class _CpuTransfers(HostTransfers):
    """Copies in a process without a GPU, whose compiled functions also take indexes as NumPy arrays."""

    def stage_indexes(self, values: np.ndarray, buffers: Buffers) -> Array:
        """Return the vector itself."""
        return values


class CudaDevice(GpuArrays):
    """Arrays of one library on the only GPU that is visible to this process.

    A process without a GPU has `_CpuTransfers` in place of `Staging`, and no NCCL.

    Attributes
    ----------
    requirements : dict
        Packages that are needed to compute on GPUs, as `cuda.find_missing_packages` takes them.
    install_hint : str
        Command that installs these packages.
    graph_library_name : str
        Graph library whose functions use this device on GPUs.
    """

    needs_gpu = True
    requirements: dict[tuple[str, ...], str]
    install_hint: str
    graph_library_name: str

    def __init__(self) -> None:
        self._gpu: str | None = None
        self._cpu_transfers = _CpuTransfers(self)

    # -- ranks -----------------------------------------------------------------------------------------------

    @property
    def is_on_gpu(self) -> bool:
        """Whether this process computes on a GPU."""
        return self._gpu is not None

    def list_missing_requirements(self) -> list[str]:
        """Return the names of the packages that are needed to compute on GPUs and not installed."""
        return cuda.find_missing_packages({**self.requirements, **cuda.GPU_REQUIREMENTS})

    def choose_gpus(self, n_local_ranks: int, local_master_index: int) -> list[str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [*map(str, range(n_local_ranks))] if visible is None else [name.strip() for name in visible.split(",")]
        if self._gpu in names:  # CUDA can't change the GPU on which it was started
            names.remove(self._gpu)
            names.insert(local_master_index, self._gpu)
        return names[:n_local_ranks]

    def initialize(self, gpu: str) -> None:
        """Start the library on one GPU, and hide all others from this process."""
        if self._gpu is None:  # else CUDA was started after an earlier fork(), and can't change its GPU
            with set_environment(CUDA_VISIBLE_DEVICES=gpu):
                self.open_gpu(gpu)
            self._gpu = gpu

    @cached_property
    def gpu_context(self) -> GpuContext:
        """CUDA's driver and streams on this process's GPU."""
        return GpuContext(self)

    # -- methods of the library --------------------------------------------------------------------------------

    @abstractmethod
    def open_gpu(self, gpu: str) -> None:
        """Start the library on the only GPU that is visible.  ``gpu`` is its name in messages."""

    # -- collectives -----------------------------------------------------------------------------------------

    def get_communicator(self, rank: Rank) -> NcclCommunicator:
        return rank.registry.get_or_create(NcclCommunicator, lambda: NcclCommunicator(rank, self.gpu_context))

    def get_group_communicator(self, rank: Rank, members: Iterable[int]) -> NcclGroupCommunicator:
        """Return the communicator of a group of ranks, always the same object for the same members."""
        communicators = rank.registry.get_or_create(_GroupCommunicatorCache)
        members = frozenset(members)
        if members not in communicators:
            communicators[members] = NcclGroupCommunicator(self.get_communicator(rank))
        return communicators[members]

    def can_transfer_directly(self, dtype: np.dtype, op: str | None = None) -> bool:
        """Whether NCCL transfers arrays of a dtype, and reduces them by ``op`` to the same result as NumPy."""
        if not self.is_on_gpu or to_nccl_dtype(dtype) is None:
            return False
        if op is None:
            return True
        reduce_op = REDUCE_OPS[op]
        return reduce_op.nccl_op is not None and not (reduce_op.nccl_drops_nan and dtype.kind not in "biu")

    def slice_items(self, array: Array, start: int, shape: tuple[int, ...]) -> ItemRange:
        itemsize = array.dtype.itemsize
        return ItemRange(array, self.get_address(array) + start * itemsize, math.prod(shape) * itemsize)

    # -- copies ----------------------------------------------------------------------------------------------

    @cached_property
    def staging(self) -> Staging:
        """Copies between host memory and this process's GPU."""
        return Staging(self.gpu_context)

    @property
    def transfers(self) -> HostTransfers:
        return self.staging if self.is_on_gpu else self._cpu_transfers

    def order_launch_after_copies(self) -> None:
        """Make the next launch wait for the copies of its inputs."""
        if self.is_on_gpu:
            self.staging.order_launch_after_copies()

    def finish_launch(self, results: Iterable[Array]) -> None:
        """Order later copies after the last launch, which reads its input buffers until ``results`` are computed."""
        if not self.is_on_gpu:
            return
        if self.stream is None:
            self.wait(list(results))
        self.staging.finish_launch()
