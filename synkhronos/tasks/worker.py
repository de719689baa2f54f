"""What a program that runs on every rank gets.

`Worker`
    Its rank, and what it does together with the others.
`Group`
    What some of the ranks do together.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.casts import check_dense
from synkhronos.checks import index, integer
from synkhronos.collectives.arguments import check_op_dtype, parse_op
from synkhronos.data.rows import get_share
from synkhronos.devices import HOST, Device, device_of
from synkhronos.devices.host import combine
from synkhronos.devices.reductions import REDUCTIONS
from synkhronos.ranks.rank import Rank
from synkhronos.ranks.task import Lock, Task

#: Bytes of a message up to which it is pickled whole; of a larger array the bytes are sent as they are.
_SMALL = 2048


class Worker:
    """One rank of a task, as its program sees it; made by `synkhronos.run`.

    Attributes
    ----------
    number : int
        The rank, from 0.
    size : int
        The number of ranks.
    is_master : bool
        Whether this is the process that called `synkhronos.run`.
    send_buffer : int
        Bytes of messages to one rank for which `send` does not wait: 131,072 for up to 11 ranks.  For more, all pairs
        of ranks share 16 MiB; each has 8,192 at least.

    Notes
    -----
    All methods that wait for other ranks raise when one of these fails, or when all ranks wait for each other. Names,
    such as that of a barrier, have to be the same on all ranks that meet there.
    """

    def __init__(self, rank: Rank, task: Task):
        self._rank, self._task = rank, task
        self.number, self.size, self.is_master = rank.number, rank.size, rank.is_master
        self.send_buffer = task.capacity

    def __repr__(self) -> str:
        return f"<synkhronos.Worker {self.number} of {self.size}>"

    # -- going on --------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Say that this rank goes on; leave the program if another rank has failed.

        To be called now and then by a program that works for long without calling compiled functions or meeting
        others, which do it too.  ``fork(timeout=...)`` counts from the last time.
        """
        self._task.progress()

    def stop(self) -> None:
        """Ask all ranks to stop; each sees it in `stopping`, and does about it what it thinks best."""
        self._task.stop()

    @property
    def stopping(self) -> bool:
        """Whether some rank has called `stop`."""
        self._task.progress()
        return self._task.is_stopped

    @property
    def waited(self) -> float:
        """The seconds for which this rank has waited for others in this program."""
        return self._task.waited

    # -- all ranks together ----------------------------------------------------------------------------------

    def barrier(self, name: str) -> None:
        """Wait until all ranks have come to the barrier of this name.

        Raises
        ------
        RuntimeError
            If another rank waits at a barrier of another name, or has come to its program's end.
        """
        self._task.meet(f"barrier {name!r}")

    def exchange(self, value: Any) -> list[Any]:
        """Show a picklable value to all ranks, and return the values of all, by rank."""
        return self._task.exchange("exchange()", value)

    def decide(self, value: Any, root: int = 0) -> Any:
        """Return one rank's value on all ranks, to decide something once for all, such as an early stop."""
        root = index(root, "root", self.size)
        values = self._task.exchange("decide()", value if self.number == root else None)
        return values[root]

    def all_reduce(self, array: Any, op: str = "avg", overwrite: bool = False) -> Any:
        """Return the reduction of all ranks' arrays, the same on every rank.

        Parameters
        ----------
        array : ndarray, or array of a GPU
            Of one shape and dtype on all ranks.  Arrays of GPUs are combined by NCCL, others in host memory.
        op : {"avg", "sum", "prod", "min", "max"}
        overwrite : bool
            Whether the result may take the array's memory.

        Returns
        -------
        ndarray, or array of a GPU
        """
        check_dense(array, "array")
        home = _home(self._rank, array, parse_op(op))
        value = array
        if home is HOST:
            host = device_of(array).to_host(array)
            value = host if overwrite and HOST.writable(host, False) is host else np.array(host, order="C")
        kind = _kind(value, op, home)
        shown = self._task.meet("all_reduce()", kind)
        if any(each != kind for each in shown):
            self._task.refuse(f"all_reduce: expected the same shape, dtype and op on all ranks, got {shown}")
        if self.size == 1:
            return value
        communicator = home.communicator(self._rank)
        if home is not HOST:
            communicator.connect(self._rank.exchange_cached(communicator.epoch))
            value = home.writable(value, is_referenced=False) if overwrite else _copied(home, value)
        value = home.written(value, communicator.all_reduce(value, op))
        communicator.meet()
        return value

    # -- some ranks ------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int]) -> Group:
        """Return what some ranks do together; each of them makes the group, of the same ranks."""
        return Group(self, self._task, ranks)

    def send(self, value: Any, to: int) -> None:
        """Send a picklable value, or an array, to another rank; values arrive in the order in which they were sent.

        Return at once while the messages that the other rank has not received yet take no more than `send_buffer`
        bytes, this one included.  A message takes the bytes of its pickle and 200 more at most.  Otherwise wait until
        the other rank has received enough of them.

        An array on a GPU that is larger than `send_buffer` is sent from GPU to GPU over NCCL; this waits until the
        other rank receives it.

        Parameters
        ----------
        value : object
        to : int
            The other rank.

        Raises
        ------
        RuntimeError
            If all ranks wait for each other.
        """
        self._check_peer(to, "to")
        home = _home(self._rank, value)
        if home is not HOST and value.size * value.dtype.itemsize > self.send_buffer:
            pair = home.group(self._rank, (self.number, to))
            if pair is not None:
                array = home.contiguous(value)
                home.wait([array])
                self._send_between_gpus(pair, array, to)
                return
        head, body = _packed(value, self._task.part)
        self._task.send(to, head, "a message")
        for at in range(0, len(body), self._task.part):
            self._task.send(to, body[at : at + self._task.part], "a message")

    def receive(self, source: int) -> Any:
        """Return the next value that another rank has sent to this one, or sends."""
        self._check_peer(source, "source")
        value, kind = pickle.loads(self._task.receive(source, "a message"))
        if kind is None:
            return value
        if kind == "place":
            raise RuntimeError(f"this rank waits for a message of rank {source}, which is at {value[0]}")
        if kind == "gpu":
            return self._receive_between_gpus(source, *value)
        if kind == "pickle":
            room = np.empty(value, np.uint8)
        else:
            room = np.empty(*value)
        view = _bytes(room.reshape(-1))
        for at in range(0, len(view), self._task.part):
            self._task.receive(source, "a message", view[at : at + self._task.part])
        return pickle.loads(room.data) if kind == "pickle" else room

    def _send_between_gpus(self, pair: Any, array: Any, to: int) -> None:
        """Send an array over NCCL: both ranks call it once the other one has received the message's head."""

        def show(how_to_connect: Any = None) -> list[Any]:
            head = (array.shape, np.dtype(array.dtype), pair.epoch, how_to_connect), "gpu"
            self._task.send(to, pickle.dumps(head, pickle.HIGHEST_PROTOCOL), "a message")
            self._task.wait_until_received(to, "a message")
            return [how_to_connect]

        if pair.epoch:
            show()
        else:
            pair.join((self.number, to), [0], show)
        pair.send(array, to)

    def _receive_between_gpus(
        self, source: int, shape: tuple[int, ...], dtype: np.dtype, epoch: int, how_to_connect: Any
    ) -> Any:
        home: Device = self._rank.device
        pair = home.group(self._rank, (source, self.number))
        if how_to_connect is not None:
            pair.join((source, self.number), [0], lambda _: [how_to_connect])
        elif epoch != pair.epoch:
            raise RuntimeError(f"rank {self.number} has given up the connection of its GPU with that of rank {source}")
        array = home.empty(shape, dtype)
        pair.receive(array, source)
        return home.written(array, is_there=True)

    def _check_peer(self, peer: int, name: str) -> None:
        integer(peer, name, "a rank")
        if not 0 <= peer < self.size or peer == self.number:
            raise ValueError(f"{name}: expected another rank than {self.number}, from 0 to {self.size - 1}, got {peer}")

    def lock(self, number: int = 0) -> Lock:
        """Return a lock that all ranks share, to be used in a ``with`` statement.

        Parameters
        ----------
        number : int
            Which one, from 0 to ``size + 7``.  On several hosts lock 1 + r, and what is used under it, is on the host
            of rank r; the others are on the first.

        Returns
        -------
        Lock
            Within the statement its `turn` says how often the lock had been taken before: no two times are alike.  Its
            `read` and `write` bring rows here and back, where the lock is on another host:

            .. code-block:: python

                with worker.lock() as lock:
                    lock.read(counter)
                    counter.array[...] += 1
                    lock.write(counter)
        """
        return self._task.lock(integer(number, "number"))

    def kept(self, name: str) -> dict[Any, Any]:
        """Return a dict of this rank's own, in which a program leaves what a later one of the same ranks finds."""
        found: dict[Any, Any] = self._rank.objects.setdefault(("kept", name), {})
        return found

    # -- data ------------------------------------------------------------------------------------------------

    def rows(self, count: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
        """Return this rank's share of so many rows, in an order that is new in each epoch.

        Parameters
        ----------
        count : int
            How many rows there are.
        epoch, seed : int
            The order follows from these two; it does not depend on the number of ranks.

        Returns
        -------
        ndarray of int64
            The shares of all ranks are all rows, each once.
        """
        order = np.random.default_rng((seed, epoch)).permutation(count)
        return order[get_share(count, self.size, self.number)]


class Group:
    """What some of the ranks do together; made by `Worker.group`.

    Arrays of GPUs are combined by NCCL, which connects the members the first time: that takes a second or two.  Others
    pass through host memory.

    Members meet by messages, in the order of all others: what one has sent another is received before they meet.

    Attributes
    ----------
    ranks : tuple of int
        The members, in order.
    number, size : int
        This rank's place among them, and how many they are.
    """

    def __init__(self, worker: Worker, task: Task, ranks: Sequence[int]):
        members = tuple(integer(r, "ranks", "integers") for r in ranks)
        if len(set(members)) != len(members) or not set(members) <= set(range(worker.size)):
            raise ValueError(f"ranks: expected different ranks from 0 to {worker.size - 1}, got {list(ranks)}")
        if worker.number not in members:
            raise ValueError(f"ranks: expected rank {worker.number}, which makes the group, among them, got {members}")
        self.ranks = members
        self.number, self.size = members.index(worker.number), len(members)
        self._rank, self._task = worker._rank, task
        self._others = [r for r in members if r != worker.number]

    def barrier(self, name: str) -> None:
        """Wait until all members have come to the barrier of this name."""
        self._meet(f"barrier {name!r}", None)

    def exchange(self, value: Any) -> list[Any]:
        """Show a small picklable value to all members, and return theirs, in the group's order."""
        return self._meet("exchange()", value)

    def all_reduce(self, array: Any, op: str = "avg") -> Any:
        """Return the reduction of all members' arrays, the same on each of them; as `Worker.all_reduce`."""
        check_dense(array, "array")
        home = _home(self._rank, array, parse_op(op))
        gpus = home.group(self._rank, self.ranks)
        result = np.array(array, order="C") if gpus is None else _copied(home, array)
        kind = _kind(result, op, HOST if gpus is None else home)
        shown = self._meet("all_reduce()", (kind, 0 if gpus is None else gpus.epoch))
        kinds = [each for each, _ in shown]
        if any(each != kind for each in kinds):
            raise RuntimeError(f"all_reduce: expected the same shape, dtype and op, got {kinds}")
        if gpus is not None:
            if self.size > 1:
                gpus.join(self.ranks, [epoch for _, epoch in shown], self.exchange)
                return home.written(result, gpus.all_reduce(result, op))
            return result
        flat = result.reshape(-1)
        each = max(1, self._task.part // flat.dtype.itemsize)
        for at in range(0, flat.size, each * self.size):
            self._reduce(flat[at : at + each * self.size], op)
        return result

    def _reduce(self, flat: np.ndarray, op: str) -> None:
        """Reduce a run of elements: each member its share of them."""
        bounds = [flat.size * i // self.size for i in range(self.size + 1)]
        low, high = bounds[self.number], bounds[self.number + 1]
        for i, r in enumerate(self.ranks):
            if i != self.number:
                self._task.send(r, _bytes(flat[bounds[i] : bounds[i + 1]]), "its share")
        parts = []
        for i, r in enumerate(self.ranks):
            part = flat[low:high]
            if i != self.number:
                part = np.empty(high - low, flat.dtype)
                self._task.receive(r, "a share", _bytes(part))
            parts.append(part)
        row = REDUCTIONS[op]
        total = np.empty(high - low, row.working(flat.dtype))
        combine(parts, row, total)
        if row.divides:
            np.true_divide(total, self.size, out=total)
        flat[low:high] = total
        for r in self._others:
            self._task.send(r, _bytes(flat[low:high]), "a result")
        for i, r in enumerate(self.ranks):
            if i != self.number:
                self._task.receive(r, "a result", _bytes(flat[bounds[i] : bounds[i + 1]]))

    def _meet(self, word: str, value: Any) -> list[Any]:
        """Wait until all members have come here, and return what each has brought."""
        word = f"{word} of group {self.ranks}"
        payload = pickle.dumps(((word, value), "place"), pickle.HIGHEST_PROTOCOL)
        if len(payload) > self._task.part:
            raise ValueError(f"{word}: expected a value of at most {self._task.part:,} bytes, got {len(payload):,}")
        for r in self._others:
            self._task.send(r, payload, word)
        shown = []
        for r in self.ranks:
            found, kind = (word, value), "place"
            if r in self._others:
                found, kind = pickle.loads(self._task.receive(r, word))
            shown.append(found if kind == "place" else ("send()", None))
        if any(other != word for other, _ in shown):
            # Each rank that sees it: members of other groups may see something else, or nothing.
            places = ", ".join(f"rank {r} is at {other}" for r, (other, _) in zip(self.ranks, shown, strict=True))
            raise RuntimeError(f"the ranks wait for each other in different places: {places}")
        return [each for _, each in shown]


def _home(rank: Rank, value: Any, op: str = "sum") -> Device:
    """Return the device whose ranks combine or send an array among themselves: that of GPUs, or else the host."""
    device: Device = rank.device
    if device is HOST or not device.holds(value) or not device.communicates(value.dtype):
        return HOST
    return HOST if REDUCTIONS[op].nccl is None else device


def _kind(array: Any, op: str, home: Device) -> tuple[Any, ...]:
    """Return what has to be the same on all ranks that reduce arrays, if that makes sense for the dtype."""
    dtype = np.dtype(array.dtype)
    if dtype.hasobject:
        raise TypeError(f"array: expected numbers, got an array of {dtype}")
    check_op_dtype(op, dtype, "an array")
    return tuple(array.shape), str(dtype), op, home.name


def _copied(home: Device, array: Any) -> Any:
    """Return a copy of a GPU's array."""
    copy = home.writable(array, is_referenced=True)
    return array.copy() if copy is array else copy


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


def _packed(value: Any, room: int) -> tuple[bytes, memoryview]:
    """Return a message's head, and what comes behind it in parts."""
    none = memoryview(b"")
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.nbytes > _SMALL:
        head = pickle.dumps(((value.shape, value.dtype), "array"), pickle.HIGHEST_PROTOCOL)
        return head, _bytes(np.ascontiguousarray(value).reshape(-1))
    whole = pickle.dumps((value, None), pickle.HIGHEST_PROTOCOL)
    if len(whole) <= room:
        return whole, none
    body = memoryview(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    return pickle.dumps((len(body), "pickle"), pickle.HIGHEST_PROTOCOL), body
