"""Worker that fails, exits or waits as its first argument says.

The second argument is the rank that does so, 1 by default.  The other ranks send requests, or wait.
"""

import os
import signal
import sys
import time

import numpy as np
from platoon.channel import Worker

worker = Worker(5567)
action, rank = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
if worker.global_rank == rank:
    if action == "raise":
        raise ValueError("the third batch is damaged")
    if action == "exit":
        sys.exit(3)
    if action == "text":
        sys.exit("there is no data")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "end":
        os._exit(7)
    if action == "lock":
        worker.lock()
        time.sleep(0.2)
        raise ValueError("the holder of the lock has failed")
    if action == "controller":
        worker.send_req("raise")
    if action in ("leave", "reduce"):
        sys.exit(0)
if action == "stuck":
    if worker.global_rank == rank:
        time.sleep(1)
        raise ValueError("the third batch is damaged\nin two of its rows")
    time.sleep(600)
if action == "leave":
    for _ in range(20):
        assert worker.send_req("next") == "train"
    sys.exit()
if action == "reduce":
    worker.all_reduce(np.zeros(2), "sum")
if action == "lock":
    time.sleep(0.1)
    worker.lock()
if action in ("idle", "busy"):
    worker.init_mb_sock(4568)
    while True:
        assert worker.send_req("next") == "train"
        worker.recv_mb()
        if action == "busy":
            worker.recv_mb()
if action == "receive":
    worker.init_mb_sock(9999)
if action == "compute":
    time.sleep(600)
while True:
    worker.send_req("next")
    time.sleep(0.002)
