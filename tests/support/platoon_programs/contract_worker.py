"""A worker written for Platoon: uses each item of its interface once, and pickles the results."""

import os
import pickle
import random
import sys
import time

import helper
import numpy as np
import theano
from platoon import Worker as SameWorker
from platoon.channel import Worker
from platoon.ops import AllReduceMax, AllReduceSum
from platoon.param_sync import EASGD
from platoon.training import global_dynamics as gd
from platoon.util import PlatoonError

try:
    from posix_ipc import BusyError
except ImportError:
    BusyError = TimeoutError


def main(args):
    record = {"helper": helper.WORD, "rate": args.rate}
    worker = Worker(**Worker.default_arguments(args))
    assert Worker() is worker and SameWorker is Worker
    rank, size = worker.global_rank, worker.global_size
    assert (rank, size) == (worker.local_rank, worker.local_size)
    record["size"] = size
    record["process"] = os.getpid()
    record["hello"] = worker.send_req("hello", {"rank": rank})
    record["echo"] = worker.send_req("echo", {"a": [1, 2.5, None, "ä"]})

    def barrier():
        worker.all_reduce(np.zeros(1), "sum")

    # shared parameters, one worker after the other
    params = [theano.shared(np.arange(4, dtype="float32") + 10 * rank), theano.shared(np.float64(rank))]
    if rank == 1:
        barrier()
    worker.init_shared_params(params, EASGD(0.25))
    if rank == 0:
        barrier()
    record["initial"] = [np.array(value) for value in worker.shared_params]
    for turn in (0, 1, 0):
        barrier()
        if rank == turn:
            worker.sync_params()
    barrier()
    record["local"] = [param.get_value() for param in params]
    record["central"] = [np.array(value) for value in worker.shared_params]
    barrier()
    if rank == 1:
        params[1].set_value(np.float64(123))
        worker.copy_to_global()
    barrier()
    worker.copy_to_local(synchronous=False)
    record["copied"] = [param.get_value() for param in params]

    # the lock
    counter = worker.shared(np.zeros(2, "int64"))
    as_floats = worker.shared(np.zeros((2, 2), "float32"))
    assert (as_floats.dtype, as_floats.shape) == ("float32", (2, 2)) and np.shares_memory(as_floats, counter)
    for _ in range(40):
        worker.lock()
        value = counter[0]
        time.sleep(random.random() * 1e-3)
        counter[0] = value + 1
        worker.unlock()
    barrier()
    record["counter"] = int(counter[0])
    if rank == 0:
        worker.lock()
    barrier()
    if rank == 1:
        for seconds in (0, 0.1):
            try:
                worker.lock(timeout=seconds)
            except BusyError:
                record[f"busy after {seconds}"] = True
    barrier()
    for misuse in (worker.lock, worker.unlock) if rank == 0 else (worker.unlock,):
        try:
            misuse()
        except PlatoonError as error:
            record[misuse.__name__] = str(error)

    # collectives
    array = np.arange(6, dtype="float32").reshape(2, 3) + rank + 1
    record["reduced"] = {op: worker.all_reduce(array, op) for op in ("+", "sum", "add", "*", "mul", "max", "minimum")}
    dest = np.empty_like(array)
    assert worker.all_reduce(array, "sum", dest) is None
    record["dest"] = dest
    shared = [theano.shared(array), theano.shared(array.sum()), theano.shared(2**60 + rank)]
    rule = gd.SumSGD()
    rule.make_rule(shared)
    rule()
    record["SumSGD"] = [variable.get_value() for variable in shared]
    mean = theano.shared(array)
    rule = gd.AverageSGD(worker)
    rule.make_rule(mean)
    rule()
    record["AverageSGD"] = mean.get_value()
    local, central = theano.shared(array), theano.shared(np.ones_like(array))
    rule = gd.EASGD()
    rule.make_rule(local, central, 0.1)
    rule()
    record["EASGD"] = local.get_value(), central.get_value()
    local, updates, center = theano.shared(array), theano.shared(array * np.nan), theano.shared(np.ones_like(array))
    updates.set_value(array)
    rule = gd.Downpour()
    rule.make_rule(local, updates, center)
    rule()
    record["Downpour"] = local.get_value(), updates.get_value(), center.get_value()
    rule = gd.GlobalDynamics()
    rule.register_fn(lambda: record.update(own=worker.all_reduce(np.float32(rank), "max")))
    rule()

    # in a graph
    x = theano.tensor.fmatrix("x")
    total, largest = theano.shared(array * 0), theano.shared(array * 0)
    function = theano.function(
        [x], AllReduceSum(x * 2).sum(), updates=[(total, AllReduceSum(x)), (largest, AllReduceMax(x))]
    )
    for _ in range(2):
        record["in a graph"] = float(function(array)), total.get_value(), largest.get_value()
    rule = gd.SumSGD()
    rule.make_rule([total, largest])
    rule()
    record["summed"] = total.get_value(), largest.get_value()
    if "jax" in sys.modules:  # functions compute with the precision for which they were compiled
        record["64 bits"] = sys.modules["jax"].config.jax_enable_x64

    # mini-batches
    worker.init_mb_sock(4567)
    barrier()  # the queue ends with its last mini-batch
    record["batches"] = []
    while worker.send_req("next") == "train":
        record["batches"].append(worker.recv_mb())
    barrier()
    try:
        worker.recv_mb()
    except PlatoonError as error:
        record["closed"] = str(error)
    record["said"] = worker.send_req("what")
    worker.close()
    with open(f"record-{rank}.pkl", "wb") as file:
        pickle.dump(record, file)
    print("worker", rank, "ends")


if __name__ == "__main__":
    parser = Worker.default_parser()
    parser.add_argument("--rate", type=float)
    main(parser.parse_args())
    sys.exit(0)
