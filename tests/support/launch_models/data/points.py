"""A DataClass as Theano-MPI's users write them: batches, a shuffle with a common seed, a shard for each rank."""

import numpy as np


class Points_data:
    """Data of points on both sides of a plane, by the interface of Theano-MPI."""

    def __init__(self, batch_size):
        rng = np.random.RandomState(0)
        x = rng.normal(size=(220, 5)).astype("float32")
        y = (x.dot(rng.normal(size=5)) > 0).astype("int32")
        self.batch_size = batch_size
        self.train = [(x[i : i + batch_size], y[i : i + batch_size]) for i in range(0, 180, batch_size)]
        self.val = [(x[i : i + batch_size], y[i : i + batch_size]) for i in range(180, 220, batch_size)]
        self.n_batch_train = len(self.train)
        self.n_batch_val = len(self.val)

    def shuffle_data(self, mode, common_seed):
        order = np.random.RandomState(common_seed).permutation(len(self.train))
        self.shuffled = [self.train[i] for i in order]

    def shard_data(self, mode, rank, size):
        self.shard = self.shuffled[rank::size][: len(self.shuffled) // size]
        self.n_batch_train = len(self.shard)
