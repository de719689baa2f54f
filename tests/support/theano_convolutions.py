"""Make Theano compile convolutions and pooling in C, also in the mode FAST_COMPILE.

In this mode Theano runs the Python versions of its Ops.  Convolutions have none.  That of pooling fails with NumPy 1.23.
"""

import synkhronos.compat  # before anything imports theano


def compile_always(operation):
    make_thunk = operation.make_thunk

    def make_compiled(self, node, storage_map, compute_map, no_recycling, impl=None):
        return make_thunk(self, node, storage_map, compute_map, no_recycling, impl="c")

    operation.make_thunk = make_compiled


if synkhronos.compat.library == "theano":
    from theano.tensor.nnet import corr
    from theano.tensor.signal import pool

    for operation in (corr.BaseCorrMM, pool.Pool, pool.PoolGrad):
        compile_always(operation)
