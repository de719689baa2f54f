"""Signals by which schedulers and terminals ask a program to end."""

from __future__ import annotations

import signal

#: Signals of a scheduler and of a closed terminal: "end", "save and end".
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds within which a second signal is taken for the first one, sent to all processes of a job.
ECHO = 1.0
