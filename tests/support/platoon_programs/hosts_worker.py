"""A worker on one of several hosts, which pickles its results."""

import os
import pickle
import socket
import sys

import numpy as np
import theano
from platoon.channel import Worker
from platoon.param_sync import EASGD
from platoon.training import global_dynamics as gd

worker = Worker(control_port=5567)
rank, local_rank = worker.global_rank, worker.local_rank
record = {"host": socket.gethostname(), "process": os.getpid()}
record["ranks"] = rank, worker.global_size, local_rank, worker.local_size
record["hello"] = worker.send_req("hello")


def barrier():
    worker.all_reduce(np.zeros(1), "sum")


# Operations within this host: shared parameters, the lock, mini-batches, and the controller's decisions.
param = theano.shared(np.arange(4, dtype="float32") + 10 * rank)
for turn in (0, 1):
    if local_rank == turn:
        worker.init_shared_params([param], EASGD(0.25))
    barrier()
for turn in (0, 1, 0):
    if local_rank == turn:
        worker.sync_params()
    barrier()
record["shared"] = param.get_value(), np.array(worker.shared_params[0])
counter = worker.shared(np.zeros(1, "int64"))
for _ in range(20):
    worker.lock()
    counter[0] += 1
    worker.unlock()
barrier()
record["counter"] = int(counter[0])
worker.init_mb_sock(4567)
barrier()  # the queue ends with its last mini-batch
record["batches"] = []
while worker.send_req("next") == "train":
    record["batches"] += worker.recv_mb()

# Operations over all hosts.
array = np.arange(6, dtype="float32").reshape(2, 3) / 3 + rank
record["reduced"] = {op: worker.all_reduce(array, op) for op in ("sum", "prod", "max", "min")}
mean, local, central = theano.shared(array), theano.shared(array), theano.shared(np.ones_like(array))
rule = gd.AverageSGD()
rule.make_rule(mean)
rule()
rule = gd.EASGD()
rule.make_rule(local, central, 0.1)
rule()
record["dynamics"] = mean.get_value(), local.get_value(), central.get_value()
with open(f"record-{rank}.pkl", "wb") as file:
    pickle.dump(record, file)
print("worker", rank, "ends", flush=True)
sys.exit(0)
