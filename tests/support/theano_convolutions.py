"""Has Theano compile convolutions and pooling, even in the mode FAST_COMPILE, which uses Python's versions of all others.

The first have no Python version, the second have one that NumPy 1.23 refuses.
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
