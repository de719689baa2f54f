"""Synkhronos runs functions of Theano and PyTensor on all devices of a machine, or of several machines, at once.

`fork` starts the ranks, one for each GPU or core.  This process is the master, the others are workers.  `function`
replaces ``pytensor.function``, and `data` puts arrays into shared memory.  A call divides the rows of the inputs among
the ranks, and reduces the outputs.

    >>> import numpy as np, pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> x = pt.dmatrix("x")
    >>> f = synk.function([x], (x.sum(axis=0), "sum"))
    >>> f(synk.data(np.ones((5, 3))))
    array([5., 5., 5.])
    >>> synk.close()
"""

from synkhronos.collectives.api import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    reduce,
    reduce_scatter,
    scatter,
    set_value,
)
from synkhronos.data_objects import Data, FileData, PartsData, data, data_file, data_parts
from synkhronos.functions import Function, distribute, function
from synkhronos.gpus import get_n_gpu
from synkhronos.programs import RankContext, run
from synkhronos.ranks import WorkerError
from synkhronos.startup import bytes_sent, close, fork
from synkhronos.timelines import Timeline, timeline

__version__ = "2.0.0"

__all__ = [
    "Data",
    "FileData",
    "Function",
    "PartsData",
    "RankContext",
    "Timeline",
    "WorkerError",
    "all_gather",
    "all_reduce",
    "broadcast",
    "bytes_sent",
    "close",
    "data",
    "data_file",
    "data_parts",
    "distribute",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_n_gpu",
    "get_shapes",
    "get_value",
    "reduce",
    "reduce_scatter",
    "run",
    "scatter",
    "set_value",
    "timeline",
]
