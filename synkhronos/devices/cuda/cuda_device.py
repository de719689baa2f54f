"""The base class of devices on GPUs."""

from __future__ import annotations

import math
import mmap
import os
from abc import abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices import cuda
from synkhronos.devices.cuda.gpu_context import GpuContext
from synkhronos.devices.cuda.nccl import ItemRange, NcclCommunicator, NcclGroupCommunicator, to_nccl_dtype
from synkhronos.devices.cuda.staging import GpuBytes, Staging
from synkhronos.devices.device import Device
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.devices.selection import Buffers, Selection
from synkhronos.patching import set_environment
from synkhronos.ranks import ArrayLocation, Rank, count_available_cores
from synkhronos.variable_types import Array

#: Number of threads that make the pages of a large array in host memory, and the minimal bytes of a large array.
_MAX_PAGE_THREADS, _MIN_PAGE_NBYTES = 4, 1 << 22


class _GroupCommunicatorCache(dict[frozenset[int], NcclGroupCommunicator]):
    """A rank's communicators of groups, by the groups' members."""


class CudaDevice(Device):
    """Arrays of one library on the only GPU that is visible to this process.

    A process without a GPU uses the methods of `Device` in place of staging and NCCL.

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

    @property
    @abstractmethod
    def stream(self) -> int | None:
        """Handle of the stream on which the library computes, or None if it is unknown."""

    @abstractmethod
    def get_address(self, array: Array) -> int:
        """Return an array's address on the GPU."""

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

    def can_communicate(self, dtype: np.dtype, op: str | None = None) -> bool:
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

    # -- inputs ----------------------------------------------------------------------------------------------

    @cached_property
    def staging(self) -> Staging:
        """Copies between shared memory and this process's GPU."""
        return Staging(self.gpu_context)

    def read_segment(self, rank: Rank, location: ArrayLocation, rows: Selection | None) -> Array:
        if self.is_on_gpu:
            return self.staging.read_segment(rank, location, rows)
        return super().read_segment(rank, location, rows)

    def empty_in_host_memory(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new NumPy array of undefined content whose pages exist, for a large result.

        The system makes new pages at their first use.  For a single thread this takes several times as long as the
        copy from the GPU.
        """
        array = np.empty(shape, dtype)
        n_threads = min(_MAX_PAGE_THREADS, count_available_cores() // 2)
        if self.is_on_gpu and array.nbytes > _MIN_PAGE_NBYTES and n_threads > 1:
            pages = array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
            with ThreadPoolExecutor(n_threads) as threads:
                list(threads.map(lambda part: part.fill(0), np.array_split(pages, n_threads)))
        return array

    def as_bytes(self, value: Array) -> Any:
        """Wait until an array is computed, and return its bytes."""
        if not self.is_on_gpu:
            return super().as_bytes(value)
        self.wait([value])
        return GpuBytes(self.staging, self.as_contiguous(value))

    def write_segment(self, rank: Rank, segment_key: int, offset: int, value: Array) -> None:
        if self.is_on_gpu:
            self.staging.write_segment(rank, segment_key, offset, self.as_contiguous(value))
        else:
            super().write_segment(rank, segment_key, offset, value)

    def stage_input(
        self, rank: Rank, location: ArrayLocation, rows: Selection | None, buffers: Buffers, must_copy: bool
    ) -> Any:
        """Start a copy of rows of shared memory to a reused buffer, and return the buffer's array."""
        if not self.is_on_gpu:
            return super().stage_input(rank, location, rows, buffers, must_copy)
        return self.staging.stage_input(rank, location, rows, buffers)

    def stage_indexes(self, values: np.ndarray, buffers: Buffers) -> Array:
        """Enqueue a copy of a vector of indexes to a reused buffer, and return the buffer's array."""
        return self.staging.stage_indexes(values, buffers) if self.is_on_gpu else values

    def order_launch_after_copies(self) -> None:
        """Make the next launch wait for the copies of its inputs."""
        if self.is_on_gpu:
            self.staging.order_launch_after_copies()

    def record_launch(self, results: Any) -> None:
        """Record that the last launch reads its input buffers until ``results`` are computed."""
        if not self.is_on_gpu:
            return
        if self.stream is None:
            self.wait(results)
        self.staging.record_launch()
