"""Detection of a worker's death while the master computes.

A waiting master polls its workers every few milliseconds.  A master that computes or compiles does not poll, and would
notice a death only at the end of its own part of the command.  Therefore the kernel sends the master a signal when a
worker's end of the socket pair closes.  The signal is SIGURG, which a process without a handler ignores, so a late
signal does no harm.  The signal cannot be used if the user has a handler of it, or if `fork` ran in a thread.  Then a
death is noticed at the master's next wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from synkhronos.ranks.interrupts import get_handler, restore_handler, set_handler
from synkhronos.ranks.segments import is_peer_closed

#: Seconds that a process may take from the closing of its files to its exit.
_EXIT_SECONDS = 1.0
# Python's fcntl has no names for these: Linux's numbers are the same on all its processors.
_F_SETSIG, _F_SETOWN_EX, _F_OWNER_TID = 10, 15, 0


class PeerDied(BaseException):
    """A worker has died while the master ran its own part of a command.  The library catches this."""


class PeerWatch:
    """Raises `PeerDied` in the main thread when a worker dies while that thread runs the master's part of a command.

    A death between commands invalidates the results of an operation with the workers that is pending then;
    ``raise_error`` raises the user's error.

    Attributes
    ----------
    command_thread : int
        Identifier of the thread that runs the master's part of a command; 0 if none does.
    has_raised : bool
        Whether `PeerDied` was raised: the user's code may have caught it.
    """

    def __init__(
        self,
        has_peer_died: Callable[[], bool],
        has_pending_operation_between_commands: Callable[[], bool],
        raise_error: Callable[[], None],
    ) -> None:
        self._has_peer_died, self._raise_error = has_peer_died, raise_error
        self._has_pending_operation_between_commands = has_pending_operation_between_commands
        self.command_thread = 0
        self.has_raised = False
        self._master_pid = os.getpid()
        self._channels: Mapping[int, socket.socket] = {}
        self._previous_handler: Any = None

    def start(self, channels: Mapping[int, socket.socket]) -> None:
        """Watch the processes at the other ends of sockets: the workers, and this host's agent."""
        if not channels or threading.current_thread() is not threading.main_thread():
            return
        previous = get_handler(signal.SIGURG)
        if isinstance(getattr(previous, "__self__", None), PeerWatch):
            previous = signal.SIG_DFL  # left by a session that was closed in another thread
        if previous not in (signal.SIG_DFL, signal.SIG_IGN):
            return  # the user's own handler
        set_handler(signal.SIGURG, self._handle_signal)
        self._previous_handler, self._channels = previous, channels
        for channel in channels.values():
            with contextlib.suppress(OSError):
                # The signal goes to the main thread: only then does it interrupt that thread's system call.
                fcntl.fcntl(channel, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, self._master_pid))
                fcntl.fcntl(channel, _F_SETSIG, signal.SIGURG)
                fcntl.fcntl(channel, fcntl.F_SETFL, fcntl.fcntl(channel, fcntl.F_GETFL) | os.O_ASYNC)

    def stop(self) -> None:
        """Restore the signal's previous handler."""
        # The session refers to this object: a reference back would be a cycle.
        self._has_peer_died = self._has_pending_operation_between_commands = lambda: False
        self._raise_error = lambda: None
        if self._previous_handler is not None and threading.current_thread() is threading.main_thread():
            restore_handler(signal.SIGURG, self._handle_signal, self._previous_handler)
            self._previous_handler = None

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._master_pid:
            return
        # Handlers run in the main thread, but another thread may run the command.
        if self.command_thread == threading.get_ident():
            # An exception in an import would leave half a package; then the next wait notices the death.
            if not _is_importing(frame) and self._wait_for_exit():
                self.command_thread, self.has_raised = 0, True
                raise PeerDied
        elif self._has_pending_operation_between_commands() and self._wait_for_exit():
            self._raise_error()

    def _wait_for_exit(self) -> bool:
        """Wait briefly for the exit of a worker whose channel is closed.  Return True if a worker has exited."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while not self._has_peer_died():
            if time.monotonic() > deadline or not any(map(is_peer_closed, list(self._channels.values()))):
                return False
            time.sleep(0.001)
        return True


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import has called a frame."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
