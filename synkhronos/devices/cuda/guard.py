"""Collectives that nobody waits for, and who gives them up.

`Guard`
    Knows what a rank has started on its GPU, whether all ranks have, and aborts what would wait for ever.

States of what was started, and who moves it::

    idle ───────────────────> exposed ──────────────────────────────> safe ─────────> idle
         `started`: this rank   │ some rank may fail before it starts   │ all have      the GPU
         has put it on its      │ the same.  `meet` waits until all     │ started it    is done
         stream                 │ have come, `come` says that this      │
                                │ rank has, and waits for nobody        │
          a rank fails, and not │                                       │ a rank dies
          all have come (`cancel`)                                     │ (the master's thread)
                                v                                       v
                              given up: `Connection.abort`, and what waits for a peer goes on
                              (also after 40 s in a command that has failed, whatever kept a peer)

The ranks agree on whether all have started (`synkhronos.ranks.agreement`), so that all cancel the collective or none
does.  This is checked by the rank that waits (`meet`), by the next command (`cancel`), and by a thread, since a rank
that waits for its GPU does not see a failure.

What is waited for is begun when nothing else is under way: collectives but ``all_reduce``, and all that some of the
ranks do alone.  So of the connections that a rank has, one at most is under way.  That one is given up first.  To give
up another frees memory on the GPU, for which CUDA waits until all that is under way there is done.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from time import perf_counter

from synkhronos.devices.cuda.connection import LOOK, PATIENCE, STUCK, Connection
from synkhronos.devices.cuda.staging import Staging
from synkhronos.ranks import Cancelled, PendingOperation, Rank
from synkhronos.ranks.interrupts import defer_signals

#: Seconds between two looks at the peers once one has failed or died and nothing was under way.
_LATER = 0.2
#: Seconds between two looks at the GPU.
PAUSE = 0.0002


class Guard(PendingOperation):
    """Gives up what was started and can't come to its end.

    Parameters
    ----------
    rank : Rank
    staging : Staging
    connection : Connection
        Of all ranks.
    stream : int
        On which it is started.

    Attributes
    ----------
    connections : list of Connection
        This rank's: that of all ranks, and those of groups.
    in_use : Connection
        The one whose work is on the stream, if there is any.
    is_lost : bool
        Whether a worker's death has ended a collective.
    leaves_wrong : bool
        Whether what may be under way leaves variables wrong if it is given up.
    """

    def __init__(self, rank: Rank, staging: Staging, connection: Connection, stream: int):
        self.is_lost = self.leaves_wrong = False
        self._rank, self._staging, self._stream = rank, staging, stream
        self.connections = [connection]
        self.in_use = connection
        self._thread: threading.Thread | None = None
        self._asking: threading.Thread | None = None
        self._ended = threading.Event()
        #: The last command in which this rank was done with a collective to which others may not have come.
        self._done_here = 0
        self.forget()

    def forget(self) -> None:
        """Nothing is under way."""
        #: The last command that started a collective without waiting for it, 0 without.
        self._under_way = 0
        #: The step at which all ranks have started it; infinity as long as this one has not come to that step.
        self._started_at: float = 0

    def abort(self, connection: Connection | None = None) -> None:
        """Give up a connection, by default the one in use, and what is on its way."""
        with defer_signals():
            self.forget()
            (connection or self.in_use).abort()

    # -- a command's part ------------------------------------------------------------------------------------

    def started(self, connection: Connection) -> None:
        """Note that what a connection puts on the stream now is not waited for, or not by this thread alone."""
        self.in_use = connection
        self._under_way = self._rank.command
        self._started_at = math.inf
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def done_here(self, connection: Connection) -> None:
        """Note that what this rank has started and waited for is done, as far as it goes.

        Who sends, as the root of a broadcast does, need not wait for who receives: NCCL has room for what is on its
        way.  A rank that fails before it comes to it would meet it in the next collective.
        """
        self.forget()
        if connection is self.connections[0]:
            self._done_here = self._rank.command

    def meet(self, look: Callable[[], None] | None = None) -> None:
        """Wait until every rank has started what this one has: from then on only a death can keep it from its end.

        Parameters
        ----------
        look : callable, optional
            Called now and then while others are late; may raise.
        """
        if self._started_at == math.inf:
            step = self._started_at = self._rank.next_step
            try:
                self._rank.barrier(look)
            except Cancelled:
                # A rank may fail when all have come: what this one waits for comes to its end then.
                if not self._rank.have_all_reached(step):
                    raise

    def come(self) -> None:
        """Tell the others that this rank has started what they wait for, and wait for nobody.

        As good as `meet` at the end of a command, whose end the master waits for.
        """
        if self._started_at == math.inf:
            self._started_at = self._rank.next_step
            self._rank.arrive()

    # -- when it is over, one way or the other ---------------------------------------------------------------

    def cancel(self, command: int) -> None:
        """Abort what a command that failed has started, unless all ranks have come to it: none does so then.

        Groups part: on all ranks, so that two of them need not ask each other whether they are connected.
        """
        if self._done_here == command != self._under_way:
            self.abort(self.connections[0])
        self._give_up(command)
        for connection in self.connections[1:]:
            connection.abort()

    def _give_up(self, command: int) -> None:
        if self._under_way == command:
            step = self._rank.last_common_step(command)  # before it is looked whether this rank has come
            if step is not None and step < self._started_at:
                self.abort()

    def is_done(self) -> bool:
        """Whether all that was put on the stream is done."""
        (result,) = self._staging.driver.cuStreamQuery(self._stream)
        return bool(result != self._staging.driver.CUresult.CUDA_ERROR_NOT_READY)

    def is_unfinished(self) -> bool:
        """Whether a collective is under way, or did not come to its end."""
        if self._under_way and not self.is_lost:
            self._staging.enter()
            return self.leaves_wrong and not self.is_done()
        return self.is_lost and self.leaves_wrong

    def finish(self) -> None:
        """Let what is under way come to its end, one way or the other."""
        self._staging.enter()
        while self._under_way and not self.is_done() and not self._rank.peer_died():
            time.sleep(PAUSE)

    def end(self) -> None:
        """Disconnect."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self.abort()  # before the others
        for connection in self.connections:
            connection.abort()

    # -- the thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Abort what is under way when a peer has died, or failed in the command that started it."""
        self._staging.enter()
        failed, since, pause = 0, 0.0, LOOK
        while not self._ended.wait(pause):
            command, pause = self._under_way, LOOK
            is_bereft = bool(command) and self._rank.peer_died()
            if not (is_bereft or (command and self._rank.has_failed(command))):
                failed = 0
                continue
            if self._seems_done():
                failed, pause = 0, _LATER
                continue
            if is_bereft:
                self.is_lost = True
                self.abort()
                # The master may have heard of the death when nothing was to be said of it, and not listen now.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
                return
            self._give_up(command)
            # Whatever has kept a peer from it: nothing waits for ever.
            if failed != command:
                failed, since = command, perf_counter()
            elif perf_counter() > since + PATIENCE:
                self.abort()

    def _seems_done(self) -> bool:
        """Whether all that was put on the stream is done, as far as CUDA says so at once.

        A stream has room for a thousand launches.  Whoever puts another one on a full stream waits inside of CUDA, for
        ever if what is under way waits for a peer that is gone; and whoever asks CUDA anything meanwhile waits with it.
        """
        answers: list[bool] = []

        def ask() -> None:
            self._staging.enter()
            answers.append(self.is_done())

        if self._asking is not None and self._asking.is_alive():
            return False
        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()
        self._asking.join(STUCK)
        return bool(answers and answers[0])
