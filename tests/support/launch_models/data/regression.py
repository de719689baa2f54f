"""Rows of a linear function, in batches."""

import numpy as np

ROWS, BATCHES, RATE, MOMENTUM = 4, 3, 0.05, 0.5


def make_rows(n_rows=ROWS * BATCHES * 2):
    rng = np.random.RandomState(0)
    x = rng.normal(size=(n_rows, 3)).astype("float32")
    return x, (x @ np.array([1, 2, 3]) + 1).astype("float32")


class Data:
    """Rank r of n has of every n batches the r-th."""

    def __init__(self, rank, size):
        x, y = make_rows()
        n_batches = len(x) // ROWS
        self.batches = [
            (x[i * ROWS : (i + 1) * ROWS], y[i * ROWS : (i + 1) * ROWS]) for i in range(rank, n_batches, size)
        ]
        self.n_batch_train = self.n_batch_val = len(self.batches)
