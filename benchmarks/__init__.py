"""How fast is it?

Each module is a program, ``python -m benchmarks.NAME``, that measures both sides of a comparison in turn within one
run, so that whatever else the machine does hits both alike.  It prints a small table, and PASS or FAIL beside each
bar.  The exit status is 0 in either case: a busy machine is no error.

`latency`
    An empty function, beside bare semaphores and two barriers; what idle ranks cost.
`all_reduce`
    100 MB on all ranks, beside NumPy in one process, PyTorch's gloo and mpi4py.
`collectives`
    All ten, beside NumPy in one process or, on GPUs, NCCL.
`rows`
    Rows by a shuffled list of indexes, beside ``x[idx]``.
`distribute`
    What three functions of one 100 MB shared variable send to a worker.
`growth`
    What the library adds on 1, 2, 4, ... 64 ranks.
`pymc_rows`
    Gradients a second of PyMC models, beside PyMC's own.

All take ``--help``.  They run with PyTensor where it is installed, else with Theano.
"""
