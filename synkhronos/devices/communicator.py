"""The interface of communicators, which run collectives over one kind of array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from synkhronos.variable_types import Array

#: Shape and dtype of an array.
ArrayLayout = tuple[tuple[int, ...], np.dtype]


class ByteSource(Protocol):
    """Bytes of an array that are not in host memory."""

    size: int

    def copy_to(self, target: np.ndarray, start: int) -> None:
        """Fill ``target``, a vector of uint8, with the bytes from offset ``start`` on."""


class Communicator(ABC):
    """Collectives over arrays of one kind.

    Every method is called on every rank, with matching arguments.  Arrays are contiguous arrays of the communicator's
    device, and all ranks know all shapes beforehand.  The items of ``out`` in `gather` and `all_gather` are results of
    the device's `slice_items`.

    The defaults are for a communicator that needs no connection, and whose collectives are complete when they return.
    """

    #: Maximal number of bytes of an all-reduce that a rank may start before it knows whether all ranks do, by the
    #: methods that `NcclCommunicator` has for it.
    max_speculative_nbytes = 0

    @property
    def generation(self) -> int:
        """Number of the connection, equal on all ranks that share it, or 0 without a connection."""
        return 0

    def connect(self, generations: Sequence[int]) -> None:  # noqa: B027 - most need no connection
        """Connect all ranks, unless the ``generations`` of all ranks show that they share a connection."""

    def wait_until_started(self) -> None:  # noqa: B027 - as above
        """Wait until all ranks have started their pending collectives."""

    def notify_started(self) -> None:  # noqa: B027 - as above
        """Notify the other ranks, without waiting, that this rank has started its collectives.

        Workers may call this instead of `wait_until_started` at the end of a command, as the master waits for them.
        """

    @abstractmethod
    def broadcast(self, array: Array, root: int) -> None:
        """Copy the root's array into every other rank's, in place."""

    @abstractmethod
    def all_reduce(self, array: Array, op: str) -> None:
        """Replace every rank's array by the reduction over all ranks, in place.

        The result may not be complete yet.  ``Device.rewrap`` returns the array to use from then on.
        """

    def wait_briefly(self) -> bool:
        """Wait a short time for the results of the last calls of `all_reduce`.  Return True if they are complete."""
        return True

    @abstractmethod
    def reduce(
        self,
        array: Array | None,
        op: str,
        root: int,
        out: Array | None,
        layout: ArrayLayout,
        contributors: Sequence[int],
    ) -> None:
        """Write the reduction of the contributors' arrays, all of one ``layout``, into the root's ``out``.

        ``array`` is None on a rank that contributes nothing, ``out`` on all ranks but the root.  The contributors are
        in ascending order.  A device's communicator may require all ranks; that of ``NUMPY`` accepts any, and as
        ``array`` a device's ``HostTransfers.as_byte_source`` of an array.
        """

    @abstractmethod
    def reduce_scatter(self, array: Array, op: str, bounds: Sequence[int], out: Array) -> None:
        """Write this rank's items of the reduction over all ranks into ``out``.

        Rank r gets the items ``bounds[r]:bounds[r + 1]`` of the flattened reduction.
        """

    @abstractmethod
    def gather(
        self, array: Array | None, root: int, layouts: Sequence[ArrayLayout | None], out: Sequence[Any | None] | None
    ) -> None:
        """Copy rank r's array into the root's ``out[r]``; None stands for a rank that contributes or gets nothing.

        In host memory, ``array`` may be a device's ``HostTransfers.as_byte_source`` of an array.
        """

    @abstractmethod
    def all_gather(self, array: Array, layouts: Sequence[ArrayLayout], out: Sequence[Any]) -> None:
        """Copy rank r's array into ``out[r]`` on every rank."""
