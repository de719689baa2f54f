"""The first argument of a program, through which a rank communicates with the other ranks.

All ranks together synchronize at barriers of the command (`ProgramPeers.barrier`).  The members of a `Group`
synchronize by messages between two ranks.

A message is a pickled head, ``(content, type)``, and for some types a body in chunks:

=========  ========================  =======================================================
type       content of the head       body
=========  ========================  =======================================================
None       the value                 none
"pickle"   number of bytes           the pickled value
"array"    shape and dtype           the bytes of the array
"gpu"      layout and connection     the array, over NCCL
"barrier"  its description, value    none; the sender has arrived at this barrier of a group
=========  ========================  =======================================================
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.casts import as_numbers, check_dense
from synkhronos.checks import check_index, check_integer
from synkhronos.collectives.arguments import check_op_dtype, check_op_name
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.devices import NUMPY, Device, find_device, get_array_device, get_rank_device
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.devices.shared_memory_communicator import reduce_arrays
from synkhronos.ranks.program_peers import Lock, ProgramPeers
from synkhronos.ranks.rank import Rank
from synkhronos.variable_types import Array

#: Size in bytes up to which an array is pickled.  A larger array is sent as a body.
_MAX_PICKLED_NBYTES = 2048


class RankContext:
    """Interface of a program to its rank: messages, collectives and locks.

    It is the first argument of a program that `synkhronos.run` runs.

    Attributes
    ----------
    number : int
        This rank, from 0.
    size : int
        Number of ranks.
    is_master : bool
        Whether this is the process that called `synkhronos.run`.
    send_buffer_nbytes : int
        Size in bytes of the buffer for messages to one rank: 131,072 for up to 11 ranks.  With more ranks, 16 MiB are
        divided among all pairs, with at least 8,192 bytes for each.

    Notes
    -----
    All methods that wait for other ranks raise an error if one of these fails, or if all ranks wait for each other.

    Examples
    --------
    A program of a module::

        def average_of_ranks(context):
            return float(context.all_reduce(np.array(context.number, "float64")))

        synk.run(average_of_ranks)
    """

    def __init__(self, rank: Rank, peers: ProgramPeers):
        self._rank, self._peers = rank, peers
        self.number, self.size, self.is_master = rank.number, rank.size, rank.is_master
        self.send_buffer_nbytes = peers.layout.channel_nbytes

    def __repr__(self) -> str:
        return f"<synkhronos.RankContext {self.number} of {self.size}>"

    # -- progress --------------------------------------------------------------------------------------------

    def report_progress(self) -> None:
        """Report that this rank makes progress; end the program if another rank has failed.

        Calls of compiled functions, and of methods that wait, do the same.  A program that computes without these for
        long should call `report_progress` periodically.  The time limit ``fork(timeout=...)`` restarts at each call.
        """
        self._peers.report_progress()

    @property
    def wait_seconds(self) -> float:
        """Total number of seconds for which this rank has waited for other ranks in this program."""
        return self._peers.wait_seconds

    # -- all ranks together ----------------------------------------------------------------------------------

    def barrier(self, name: str) -> None:
        """Wait until all ranks have arrived at the barrier with this name.

        Raise RuntimeError if another rank is at a barrier with another name, or at the end of its program.
        """
        self._peers.barrier(f"barrier {name!r}")

    def all_gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in rank order.  Each rank passes a picklable value."""
        return self._peers.all_gather(value, "all_gather()")

    def broadcast(self, value: object, root: int = 0) -> Any:
        """Return the value of rank ``root`` on all ranks, such as a common decision to stop."""
        root = check_index(root, "root", self.size)
        values = self._peers.all_gather(value if self.number == root else None, "broadcast()")
        return values[root]

    def all_reduce(self, array: Any, op: str = "avg", overwrite: bool = False) -> Array:
        """Return the reduction of all ranks' arrays, the same on every rank.

        Parameters
        ----------
        array : array_like, or array on a GPU
            Array of the same shape and dtype on all ranks.  Arrays on GPUs are reduced by NCCL, others in host memory.
        op : str
            Elementwise op such as "avg" or "sum" (see :ref:`ops`).
        overwrite : bool
            Whether the result may use the memory of the argument.

        Returns
        -------
        ndarray, or array on a GPU

        Raises
        ------
        RuntimeError
            If shape, dtype or op differ between ranks.
        """
        array = _as_array(array)
        device = _choose_transfer_device(self._rank, array, check_op_name(op))
        value = array
        if device is NUMPY:
            numpy_array = get_array_device(array).to_numpy(array)
            can_overwrite = overwrite and NUMPY.as_writable(numpy_array, False) is numpy_array
            value = numpy_array if can_overwrite else np.array(numpy_array, order="C")
        reduction = _describe_reduction(value, op, device)
        reductions = self._peers.all_gather_if_different(reduction, "all_reduce()")
        if any(other != reduction for other in reductions):
            self._rank.raise_common_error(
                RuntimeError(f"all_reduce: expected the same shape, dtype and op on all ranks, got {reductions}")
            )
        if self.size == 1:
            return value
        communicator = device.get_communicator(self._rank)
        if device is not NUMPY:
            communicator.connect(self._rank.all_gather_if_different(communicator.generation))
            value = device.as_writable(value, has_other_references=False) if overwrite else _copy_array(device, value)
        communicator.all_reduce(value, op)
        value = device.rewrap(value, communicator.wait_briefly())
        communicator.wait_until_started()
        return value

    # -- some ranks ------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int]) -> Group:
        """Return a `Group` of some ranks, including this one.  Each member has to create it, with the same list."""
        return Group(self, ranks)

    def send(self, value: Any, dest: int) -> None:
        """Send a picklable value, or an array, to another rank.  Messages between two ranks are delivered in order.

        The call returns at once if all messages that the other rank has not received fit into `send_buffer_nbytes`
        bytes.  Otherwise it waits until the other rank has received enough of them.  A message takes at most 200 bytes
        more than its pickle.

        An array on a GPU that is larger than `send_buffer_nbytes` is sent from GPU to GPU by NCCL.  Then the call waits
        until the other rank receives it.

        Parameters
        ----------
        value : object
        dest : int
            Rank of the receiver.

        Raises
        ------
        RuntimeError
            If all ranks wait for each other.
        """
        self._check_peer(dest, "dest")
        device = _choose_transfer_device(self._rank, value)
        if device is not NUMPY and value.size * value.dtype.itemsize > self.send_buffer_nbytes:
            pair_communicator = device.get_group_communicator(self._rank, (self.number, dest))
            if pair_communicator is not None:
                array = device.as_contiguous(value)
                device.wait([array])
                self._send_between_gpus(pair_communicator, array, dest)
                return
        head, body = _pack_message(value, self._peers.max_chunk_nbytes)
        self._peers.send(dest, head, "a message")
        for start in range(0, len(body), self._peers.max_chunk_nbytes):
            self._peers.send(dest, body[start : start + self._peers.max_chunk_nbytes], "a message")

    def receive(self, source: int) -> Any:
        """Wait for the next value that rank ``source`` sends to this one, and return it."""
        self._check_peer(source, "source")
        value, message_type = pickle.loads(self._peers.receive(source, "a message"))
        if message_type is None:
            return value
        if message_type == "barrier":
            raise RuntimeError(f"this rank waits for a message of rank {source}, which is at {value[0]}")
        if message_type == "gpu":
            return self._receive_between_gpus(source, *value)
        body = np.empty(value, np.uint8) if message_type == "pickle" else np.empty(*value)
        view = _view_bytes(body.reshape(-1))
        for start in range(0, len(view), self._peers.max_chunk_nbytes):
            self._peers.receive(source, "a message", view[start : start + self._peers.max_chunk_nbytes])
        return pickle.loads(body.data) if message_type == "pickle" else body

    def _send_between_gpus(self, pair_communicator: Any, array: Array, dest: int) -> None:
        """Send an array by NCCL, after the other rank has received the head of the message.

        NCCL's send blocks until the receiver has called its counterpart.
        """

        def send_head(connection_id: Any = None) -> list[Any]:
            head = (array.shape, np.dtype(array.dtype), pair_communicator.generation, connection_id), "gpu"
            self._peers.send(dest, pickle.dumps(head, pickle.HIGHEST_PROTOCOL), "a message")
            self._peers.wait_until_received(dest)
            return [connection_id]

        if pair_communicator.generation:
            send_head()
        else:
            pair_communicator.connect_members((self.number, dest), [0], send_head)
        pair_communicator.send(array, dest)

    def _receive_between_gpus(
        self, source: int, shape: tuple[int, ...], dtype: np.dtype, generation: int, connection_id: Any
    ) -> Array:
        device = get_rank_device(self._rank)
        pair_communicator = device.get_group_communicator(self._rank, (source, self.number))
        if connection_id is not None:
            pair_communicator.connect_members((source, self.number), [0], lambda _: [connection_id])
        elif generation != pair_communicator.generation:
            raise RuntimeError(f"rank {self.number} has closed the connection of its GPU with that of rank {source}")
        array = device.empty(shape, dtype)
        pair_communicator.receive(array, source)
        return device.rewrap(array, is_complete=True)

    def _check_peer(self, peer: int, name: str) -> None:
        check_integer(peer, name, "a rank")
        if not 0 <= peer < self.size or peer == self.number:
            raise ValueError(f"{name}: expected another rank than {self.number}, from 0 to {self.size - 1}, got {peer}")

    def lock(self, number: int = 0) -> Lock:
        """Return a lock that all ranks share, to be used in a ``with`` statement.

        Parameters
        ----------
        number : int
            Number of the lock, from 0 to ``size + 7``.  With several hosts, lock 1 + r belongs to the host of rank r,
            and so does the valid copy of the rows that it guards.  The other locks belong to the first host.  Trainers
            take locks size + 1 and size + 7 themselves, and the library's exchange rules take locks 0 to size.

        Returns
        -------
        Lock
            Its methods `pull` and `push` copy rows from and to the lock's host, if that is another host:

            .. code-block:: python

                with context.lock() as lock:
                    lock.pull(counter)
                    counter.array[...] += 1
                    lock.push(counter)
        """
        return self._peers.get_lock(check_integer(number, "number"))

    def get_persistent_dict(self, name: str) -> dict[Any, Any]:
        """Return the dict of this name.  Programs on this rank store objects in it for later ones, until `close`."""
        persistent: dict[Any, Any] = self._rank.get_or_add_object(("persistent dict", name), dict)
        return persistent

    # -- data ------------------------------------------------------------------------------------------------

    def rows(self, count: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
        """Return this rank's share of the indexes of ``count`` shuffled rows.

        Each row is in the share of exactly one rank.  The order of all rows depends on ``epoch`` and ``seed``, but not
        on the number of ranks.
        """
        order = np.random.default_rng((seed, epoch)).permutation(count)
        return order[get_share_slice(count, self.size, self.number)]


class Group:
    """A subset of the ranks that synchronize and reduce among themselves; made by `RankContext.group`.

    NCCL reduces arrays on GPUs.  It connects the members at the first use, which takes a second or two.  Other arrays
    are transferred through host memory.

    A group communicates by messages between its members, which are delivered in order.  So before two members call a
    method of the group, each has to receive all messages that the other has sent by `RankContext.send`.

    Attributes
    ----------
    ranks : tuple of int
        Members, in the order of the group.
    number, size : int
        Position of this rank among the members, and number of members.
    """

    def __init__(self, context: RankContext, ranks: Sequence[int]):
        members = tuple(check_integer(r, "ranks", "integers") for r in ranks)
        if len(set(members)) != len(members) or not set(members) <= set(range(context.size)):
            raise ValueError(f"ranks: expected different ranks from 0 to {context.size - 1}, got {list(ranks)}")
        if context.number not in members:
            raise ValueError(f"ranks: expected rank {context.number}, which makes the group, among them, got {members}")
        self.ranks = members
        self.number, self.size = members.index(context.number), len(members)
        self._rank, self._peers = context._rank, context._peers
        self._other_ranks = [r for r in members if r != context.number]

    def barrier(self, name: str) -> None:
        """Wait until all members have arrived at the barrier with this name."""
        self._gather_at_barrier(f"barrier {name!r}", None)

    def all_gather(self, value: object) -> list[Any]:
        """Return the values of all members, in the order of the group.  Each passes a small picklable value."""
        return self._gather_at_barrier("all_gather()", value)

    def all_reduce(self, array: Any, op: str = "avg") -> Array:
        """Return the reduction of all members' arrays on each member; see `RankContext.all_reduce`."""
        array = _as_array(array)
        device = _choose_transfer_device(self._rank, array, check_op_name(op))
        communicator = device.get_group_communicator(self._rank, self.ranks)
        result = np.array(array, order="C") if communicator is None else _copy_array(device, array)
        reduction = _describe_reduction(result, op, NUMPY if communicator is None else device)
        generation = 0 if communicator is None else communicator.generation
        gathered = self._gather_at_barrier("all_reduce()", (reduction, generation))
        reductions = [other for other, _ in gathered]
        if any(other != reduction for other in reductions):
            raise RuntimeError(f"all_reduce: expected the same shape, dtype and op, got {reductions}")
        if communicator is not None:
            if self.size > 1:
                communicator.connect_members(self.ranks, [generation for _, generation in gathered], self.all_gather)
                communicator.all_reduce(result, op)
                return device.rewrap(result, communicator.wait_briefly())
            return result
        flat = result.reshape(-1)
        block_size = self.size * max(1, self._peers.max_chunk_nbytes // flat.dtype.itemsize)  # a chunk for each member
        for start in range(0, flat.size, block_size):
            self._reduce_in_place(flat[start : start + block_size], op)
        return result

    def _reduce_in_place(self, flat: np.ndarray, op: str) -> None:
        """Reduce a vector in place: each member reduces its share, and sends the result to the others."""
        bounds = [flat.size * i // self.size for i in range(self.size + 1)]
        shares = [flat[start:stop] for start, stop in itertools.pairwise(bounds)]
        own_share = shares[self.number]
        others = [(rank, share) for rank, share in zip(self.ranks, shares, strict=True) if rank in self._other_ranks]
        for rank, share in others:
            self._peers.send(rank, _view_bytes(share), "its share")
        contributions = []
        for rank in self.ranks:
            contribution = own_share
            if rank in self._other_ranks:
                contribution = np.empty_like(own_share)
                self._peers.receive(rank, "a share", _view_bytes(contribution))
            contributions.append(contribution)
        total = np.empty_like(own_share)
        reduce_arrays(contributions, REDUCE_OPS[op], total)
        own_share[...] = total
        for rank in self._other_ranks:
            self._peers.send(rank, _view_bytes(own_share), "a result")
        for rank, share in others:
            self._peers.receive(rank, "a result", _view_bytes(share))

    def _gather_at_barrier(self, description: str, value: object) -> list[Any]:
        """Wait until all members have arrived at this barrier, and return each member's value."""
        description = f"{description} of group {self.ranks}"
        payload = pickle.dumps(((description, value), "barrier"), pickle.HIGHEST_PROTOCOL)
        max_nbytes = self._peers.max_chunk_nbytes
        if len(payload) > max_nbytes:
            raise ValueError(f"{description}: expected a value of at most {max_nbytes:,} bytes, got {len(payload):,}")
        for r in self._other_ranks:
            self._peers.send(r, payload, description)
        gathered = []
        for r in self.ranks:
            content, message_type = (description, value), "barrier"
            if r in self._other_ranks:
                content, message_type = pickle.loads(self._peers.receive(r, description))
            gathered.append(content if message_type == "barrier" else ("send()", None))
        if any(other != description for other, _ in gathered):
            # Not `Rank.raise_common_error`, since the master may not be a member.
            positions = (f"rank {r} is at {other}" for r, (other, _) in zip(self.ranks, gathered, strict=True))
            raise RuntimeError(f"the ranks wait for each other in different places: {', '.join(positions)}")
        return [member_value for _, member_value in gathered]


def get_rank(context: RankContext) -> Rank:
    """Return the `Rank` of a context, for other packages of the library."""
    return context._rank


def get_rank_lock(context: RankContext, rank: int) -> Lock:
    """Return the lock on a rank's host, which guards the rank's rows in shared memory, such as its mailbox."""
    return context.lock(1 + rank)


def get_batch_counts_lock(context: RankContext) -> Lock:
    """Return the lock of a trainer's counts of batches, which asynchronous ranks have taken."""
    return context.lock(context.size + 1)


def get_stop_flag_lock(context: RankContext) -> Lock:
    """Return the lock of a trainer's flag by which the master requests a stop."""
    return context.lock(context.size + 7)


def _choose_transfer_device(rank: Rank, value: Any, op: str | None = None) -> Device:
    """Return the device whose communicator transfers and reduces an array: the rank's GPU if it can, else the host."""
    device = get_rank_device(rank)
    return device if device.owns(value) and device.can_transfer_directly(value.dtype, op) else NUMPY


def _as_array(array: Any) -> Array:
    """Return an array on a GPU unchanged, and anything else as a NumPy array; raise TypeError unless it has numbers."""
    check_dense(array, "array")
    is_of_other_library = isinstance(array, np.ndarray) and array.dtype.isbuiltin == 2  # such as ml_dtypes.bfloat16
    return array if is_of_other_library or find_device(array) is not NUMPY else as_numbers(array, "array")


def _describe_reduction(array: Array, op: str, device: Device) -> tuple[Any, ...]:
    """Return shape, dtype, op and device, which have to be equal on all ranks.

    Raise ValueError if the reduction is not defined for the dtype.
    """
    dtype = np.dtype(array.dtype)
    check_op_dtype(op, dtype, "an array")
    return tuple(array.shape), str(dtype), op, device.name


def _copy_array(device: Device, array: Array) -> Array:
    """Return a copy of an array on a GPU."""
    copy = device.as_writable(array, has_other_references=True)
    return array.copy() if copy is array else copy


def _view_bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


def _pack_message(value: object, max_chunk_nbytes: int) -> tuple[bytes, memoryview]:
    """Return the head and the body of a message."""
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.nbytes > _MAX_PICKLED_NBYTES:
        head = pickle.dumps(((value.shape, value.dtype), "array"), pickle.HIGHEST_PROTOCOL)
        return head, _view_bytes(np.ascontiguousarray(value).reshape(-1))
    message = pickle.dumps((value, None), pickle.HIGHEST_PROTOCOL)
    if len(message) <= max_chunk_nbytes:
        return message, memoryview(b"")
    body = memoryview(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    return pickle.dumps((len(body), "pickle"), pickle.HIGHEST_PROTOCOL), body
