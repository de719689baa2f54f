"""The session of this process: its start, its end, and access to it."""

from __future__ import annotations

import atexit
import os

from synkhronos.ranks.command import Command
from synkhronos.ranks.command_runner import INHERITED_SESSION
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.link import Link
from synkhronos.ranks.session import Session

_current: Session | None = None


def start_session(
    size: int,
    master_rank: int,
    profile: bool,
    timeout: float | None = None,
    first_command: Command | None = None,
    spawn: bool = False,
    link: Link | None = None,
) -> Session:
    """Start a session and run its first command.  If either fails, end the session and raise the error.

    With ``profile``, each worker writes a profile when it exits.  For the other parameters see `Session`.
    """
    global _current
    check_no_session()
    atexit.unregister(close_session)
    atexit.register(close_session)
    session: Session | None = None
    try:
        # An interrupt must not come between the change of this process's state and the assignment.
        with defer_signals():
            session = _current = Session(size, master_rank, timeout, spawn, link)
        session.start(profile, first_command)
    except BaseException:
        if session is not None:
            session.close(kill=True)
        raise
    return session


def close_session() -> None:
    """End the session, if there is one."""
    if _current is not None:
        _current.close()


def get_session() -> Session:
    """Return the running session.  Raise RuntimeError before `fork`, after `close`, and after the death of a worker."""
    if _current is None:
        raise RuntimeError("no ranks are running: call synkhronos.fork() first")
    if _current.close_reason is not None:
        raise RuntimeError(_current.close_reason)
    if _current.is_inherited:
        raise RuntimeError(INHERITED_SESSION)
    return _current


def get_last_session() -> Session | None:
    """Return this process's last session, which may have ended, or None before `fork`."""
    return _current


def get_inherited_session() -> Session | None:
    """Return the running session of the master that this process is a fork of, or None in any other process."""
    return _current if _current is not None and _current.is_inherited and _current.close_reason is None else None


def check_no_session() -> None:
    """Raise RuntimeError if a session of this process is running."""
    if _current is not None and _current.close_reason is None and not _current.is_inherited:
        raise RuntimeError(
            f"{_current.size} ranks are running already: call synkhronos.close() before synkhronos.fork()"
        )


def _mark_inherited() -> None:
    """Record, in a process forked from the master, that the session belongs to its parent."""
    if _current is not None:
        _current.is_inherited = True


os.register_at_fork(after_in_child=_mark_inherited)  # cheaper than os.getpid() in each call
