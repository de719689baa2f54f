"""Platoon's modules under their own names, on the ranks of `synkhronos.run`.

``python -m synkhronos platoon NAME`` starts scripts that were written for Platoon; within them ``import platoon``
finds this package.  Processes of one experiment::

    launcher ─── controller: runs NAME_controller.py, answers requests
                     │ starts, ends with its parent
                 worker 0: the master of the ranks; runs NAME_worker.py
                     │ forks
                 workers 1, 2, ...: the other ranks; run NAME_worker.py

On several hosts the ranks are the ranks of ``fork(hosts=...)``, and each host has a controller.  The controller of the
first host starts worker 0, as above.  On another host the first worker starts the controller, which ends with its
workers.

Every worker has a socket to the controller of its host, for requests and for the report of its own failure.
Collectives and the lock are methods of `synkhronos.RankContext`.  Shared parameters are in memory that the controller
creates, and whose file descriptor it sends to each worker.  Mini-batches are sent over sockets by the process that
calls ``send_mb``.
"""

from synkhronos.platoon.channel import Controller, Worker

__all__ = ["Controller", "Worker"]
