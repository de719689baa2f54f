"""A worker that fails on one of the ranks, in the way that its arguments name; the others ask for ever."""

import os
import signal
import sys
import time

import numpy as np
from platoon.channel import Worker

worker = Worker(5567)
how, rank = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
if worker.global_rank == rank:
    if how == "raise":
        raise ValueError("the third batch is damaged")
    if how == "exit":
        sys.exit(3)
    if how == "text":
        sys.exit("there is no data")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "end":
        os._exit(7)
    if how == "lock":
        worker.lock()
        time.sleep(0.2)
        raise ValueError("the holder of the lock has failed")
    if how == "controller":
        worker.send_req("raise")
    if how in ("leave", "reduce"):
        sys.exit(0)
if how == "stuck":
    if worker.global_rank == rank:
        time.sleep(1)
        raise ValueError("the third batch is damaged\nin two of its rows")
    time.sleep(600)
if how == "leave":
    for _ in range(20):
        assert worker.send_req("next") == "train"
    sys.exit()
if how == "reduce":
    worker.all_reduce(np.zeros(2), "sum")
if how == "lock":
    time.sleep(0.1)
    worker.lock()
if how in ("idle", "busy"):
    worker.init_mb_sock(4568)
    while True:
        assert worker.send_req("next") == "train"
        worker.recv_mb()
        if how == "busy":
            worker.recv_mb()
if how == "receive":
    worker.init_mb_sock(9999)
if how == "compute":
    time.sleep(600)
while True:
    worker.send_req("next")
    time.sleep(0.002)
