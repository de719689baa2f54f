"""Sockets between processes of one experiment, on one machine and for one user.

Addresses are in Linux's abstract namespace, which has no files to remove.  Both ends check that the other one belongs
to the same user.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from synkhronos.ranks.segments import get_peer_ids

#: Seconds after which a waiting process checks its peers.
POLL_SECONDS = 0.05


def listen(address: str) -> socket.socket:
    """Return a listening socket; raise OSError if another one listens at this address."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    listener.listen(socket.SOMAXCONN)
    return listener


def accept(listener: socket.socket) -> Connection | None:
    """Accept a connection; None if it is another user's."""
    return _wrap_socket_of_same_user(listener.accept()[0])


def connect(address: str, on_poll: Callable[[], None], timeout: float) -> Connection | None:
    """Wait until a process listens at an address, and connect; None after ``timeout`` seconds or for another user's.

    ``on_poll`` is called while this process waits; it may raise.
    """
    deadline = time.monotonic() + timeout
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(f"\0{address}")
            return _wrap_socket_of_same_user(client)
        except (ConnectionRefusedError, BlockingIOError):
            client.close()
            on_poll()
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS / 5)


def _wrap_socket_of_same_user(client: socket.socket) -> Connection | None:
    """Return a connection over a connected socket; close the socket and return None if its peer is another user's."""
    if get_peer_ids(client)[1] != os.getuid():
        client.close()
        return None
    return Connection(client.detach())
