"""The master's end of the mailbox, through which it posts commands to the workers."""

from __future__ import annotations

import pickle
from typing import Any

from synkhronos.containers import BoundedCache
from synkhronos.ranks.command import MAX_CACHED_COMMANDS, MAX_CACHED_NBYTES, Command, OversizedCommand
from synkhronos.ranks.control_memory import AWAITS_COMMAND, MAILBOX_NBYTES, ControlMemory
from synkhronos.ranks.link import Link
from synkhronos.ranks.memory_table import MemoryTable
from synkhronos.ranks.segments import ArrayLocation


class Mailbox:
    """Posts commands to the workers of this host, and to the agent that sends them to other hosts."""

    def __init__(self, control: ControlMemory, link: Link, memory: MemoryTable):
        self._control, self._link, self._memory = control, link, memory
        self._pickle_cache: BoundedCache[Any, bytes] = BoundedCache(MAX_CACHED_COMMANDS)
        #: The last command whose pickle is in the cache, and this pickle.
        self._last_command: Command | None = None
        self._last_message = b""

    def post(self, command_number: int, command: Command) -> None:
        """Send a command: in the mailbox, or in a segment of its own if it is too long for that."""
        message = self._pickle(command)
        if len(message) <= MAILBOX_NBYTES - self._link.max_plan_nbytes:
            self._write(command_number, command, message, None)
            return
        segment = self._memory.create_segment(len(message), may_run_command=False)
        try:
            memoryview(segment.buffer).cast("B")[: len(message)] = message
            location = ArrayLocation(segment.key, "u1", (len(message),))
            message = pickle.dumps(OversizedCommand(location), pickle.HIGHEST_PROTOCOL)
            self._write(command_number, command, message, location)
        finally:
            self._memory.release("segment", segment.key)

    def _pickle(self, command: Command) -> bytes:
        """Return the pickled command, from a cache if it was sent before: a training loop repeats a few commands."""
        if command is self._last_command:
            return self._last_message
        # Commands of different classes may compare equal as tuples.
        key = type(command), command
        try:
            message = self._pickle_cache.get(key)
        except TypeError:  # not hashable, such as a slice before Python 3.12
            return pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if message is None:
            message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
            if len(message) > MAX_CACHED_NBYTES:
                return message
            self._pickle_cache[key] = message
        self._last_command, self._last_message = command, message
        return message

    def _write(self, command_number: int, command: Command, message: bytes, location: ArrayLocation | None) -> None:
        """Write a message into the mailbox and wake the workers.  ``location`` is that of an oversized command."""
        control, words = self._control, self._control.words
        self._memory.send_segments()
        control.mailbox[: len(message)] = message
        words[ControlMemory.MESSAGE_NBYTES] = len(message)
        if self._link.max_plan_nbytes:
            plan = self._link.plan_transfers(command, location, self._memory.segments)
            control.mailbox[len(message) : len(message) + len(plan)] = plan
            words[ControlMemory.PLAN_NBYTES] = len(plan)
        words[ControlMemory.NEWEST_KEY] = self._memory.last_sent_key
        words[ControlMemory.POSTED] = command_number
        control.wake_local_ranks(AWAITS_COMMAND)
