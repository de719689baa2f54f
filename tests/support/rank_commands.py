"""Commands that tests of ranks send."""

import mmap
import os
import time
from dataclasses import dataclass

from synkhronos.ranks import Command


@dataclass(frozen=True)
class GetIdentity(Command):
    """Command that returns the rank's number, the number of ranks, whether it is the master, and its process ID."""

    def run(self, rank):
        return rank.number, rank.size, rank.is_master, os.getpid()


@dataclass(frozen=True)
class GatherMessages(Command):
    """Command that gathers messages of these sizes, and checks them on each rank."""

    sizes: tuple

    def run(self, rank):
        for size in self.sizes:
            message = (rank.number, b"x" * (size * (rank.number + 1)))
            messages = rank.all_gather(message)
            assert messages == [(r, b"x" * (size * (r + 1))) for r in range(rank.size)]
        return len(messages)


@dataclass(frozen=True)
class CountOpenFiles(Command):
    """Command that returns each rank's numbers of segments and of open file descriptors."""

    def run(self, rank):
        return rank.all_gather((len(rank.segments), len(os.listdir("/proc/self/fd"))))


@dataclass(frozen=True)
class Sleep(Command):
    """Command that sleeps on the master, the workers or all ranks."""

    seconds: float
    sleeping_ranks: str

    def run(self, rank):
        if self.sleeping_ranks == "all" or (self.sleeping_ranks == "master") == rank.is_master:
            deadline = time.monotonic() + self.seconds
            while time.monotonic() < deadline:
                time.sleep(0.01)
        return "slept"


#: Memory of the master and of its forked workers: its first byte ends all `Hold` commands.
_RELEASED = mmap.mmap(-1, mmap.PAGESIZE)


@dataclass(frozen=True)
class Hold(Command):
    """Command that ends on the held ranks, "master", "workers" or "all", once the master calls `release`."""

    held_ranks: str

    def run(self, rank):
        if self.held_ranks == "all" or (self.held_ranks == "master") == rank.is_master:
            while not _RELEASED[0]:
                time.sleep(0.01)

    @staticmethod
    def prepare():
        _RELEASED[0] = 0

    @staticmethod
    def release():
        _RELEASED[0] = 1


@dataclass(frozen=True)
class RecordRun(Command):
    """Command that records its run and its end on each rank, and fails on the rank `failing_rank`.

    With `records_before_barrier` the other ranks record the effect before the failure for certain.
    """

    label: str
    failing_rank: int = -1
    records_before_barrier: bool = False
    effect_sentence: str = "It was noted"

    def run(self, rank, records_effect=True):
        notes = rank.objects.setdefault("notes", [])
        notes.append(self.label)
        rank.finish_callbacks.append(lambda: notes.append(f"{self.label} finished"))
        if self.records_before_barrier and rank.number != self.failing_rank:
            rank.record_effect()
        rank.barrier()
        if rank.number == self.failing_rank:
            raise ArithmeticError("no")
        if records_effect:
            rank.record_effect()
        return self.label, rank.number


@dataclass(frozen=True)
class CollectRecords(Command):
    """Command that returns the records of `RecordRun` of each rank, and removes them."""

    def run(self, rank):
        return rank.all_gather(rank.objects.pop("notes", []))


@dataclass(frozen=True)
class RunBoth(Command):
    """Command that consists of two; only the effect of the second is counted."""

    first: RecordRun
    second: RecordRun
    effect_sentence: str = "It was noted"

    def run(self, rank):
        return [self.first.run(rank, records_effect=False), self.second.run(rank)]
