"""Sources of rows that loader processes import.

From a test file, a loader process would import pytest and the graph library, too.
"""

import os
import signal
import time

import numpy as np


class NumberedPictures:
    """Rows that identify themselves: a picture made from the row number, and the number."""

    def __init__(self, count, size=6):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return make_picture(row, self.size), row

    def describe_row(self, row):
        return f"/pictures/{row}.jpg"


def make_picture(row, size=6):
    """Return a picture whose pixels differ from each other and between rows."""
    return (np.arange(2 * size * size, dtype="int64") + 1000 * row).reshape(2, size, size)


def make_order(count, seed=0, epoch=0):
    """Return the order in which a loader shuffles rows."""
    return np.random.default_rng((seed, epoch)).permutation(count)


class OwnArrays:
    """Rows that are arrays of the source itself."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


def add_one_in_place(row, random):
    """Add 1 to each element of a row's only array."""
    row[0][...] += 1
    return row


class DamagedPictures(NumberedPictures):
    """Rows of which some raise errors, have another shape, or kill their process."""

    def __init__(self, count, bad=(), odd=(), kills=None):
        super().__init__(count)
        self.bad, self.odd, self.kills = bad, odd, kills

    def __getitem__(self, row):
        if row in self.bad:
            raise OSError(f"image file is truncated ({row} bytes not processed)")
        if row in self.odd:
            return make_picture(row, 5), row
        if self.kills is not None and row == self.kills[0] and not os.path.exists(self.kills[1]):
            open(self.kills[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


class DeepErrorPictures(NumberedPictures):
    """Rows of which all but the first raise an error below a deep stack of calls."""

    def __getitem__(self, row):
        return self.descend(50) if row else super().__getitem__(row)

    def descend(self, depth):
        return self.descend_further(depth - 1)

    def descend_further(self, depth):
        if depth < 0:
            raise OSError("the bottom")
        return self.descend(depth - 1)


class SlowPictures(NumberedPictures):
    """`NumberedPictures` that take seconds to read."""

    def __init__(self, count, seconds):
        super().__init__(count)
        self.seconds = seconds

    def __getitem__(self, row):
        time.sleep(self.seconds)
        return super().__getitem__(row)


class BlockedPicture(NumberedPictures):
    """`NumberedPictures` of which one row can be read only after the file ``go`` in a folder exists."""

    def __init__(self, count, row, folder):
        super().__init__(count)
        self.row, self.folder = row, folder

    def __getitem__(self, row):
        if row == self.row:
            open(os.path.join(self.folder, "held"), "w").close()
            while not os.path.exists(os.path.join(self.folder, "go")):
                time.sleep(0.01)
        return super().__getitem__(row)


class MixedDtypeRows:
    """Rows whose first has another dtype than the others."""

    def __init__(self, first, others):
        self.rows = [first, others, others]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


class PictureIterable:
    """An iterable without a length."""

    def __init__(self, count, fails_at=None):
        self.count, self.fails_at = count, fails_at

    def __iter__(self):
        for row in range(self.count):
            if row == self.fails_at:
                raise OSError("the archive ends here")
            yield make_picture(row), row


def add_noise(row, random):
    """Augment a row."""
    image, label = row
    return image + random.integers(1000, size=image.shape), label


#: Regression problem of `RegressionRows`: y = x @ [1, 2, 3].
ROWS = np.random.default_rng(0).normal(size=(103, 3))
TARGETS = ROWS @ [1.0, 2.0, 3.0]


class RegressionRows:
    """A regression problem, whose rows are read one by one."""

    def __len__(self):
        return 103

    def __getitem__(self, row):
        return ROWS[row], TARGETS[row]


class SlowRegressionRows(RegressionRows):
    """`RegressionRows` that take seconds to read."""

    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        time.sleep(self.seconds)
        return super().__getitem__(row)


DAMAGED_ROWS = {4, 5, 50, 77}


class PartlyDamagedRows(RegressionRows):
    """`RegressionRows` of which a few cannot be read."""

    def __getitem__(self, row):
        if row in DAMAGED_ROWS:
            raise OSError("damaged")
        return super().__getitem__(row)


class MostlyDamagedRows(RegressionRows):
    """`RegressionRows` of which few can be read: whole consecutive batches of a rank cannot."""

    def __getitem__(self, row):
        if row % 8:
            raise OSError("damaged")
        return super().__getitem__(row)


class UnloadableRows(RegressionRows):
    """Rows that no loader can read."""

    def __init__(self):
        self.creator_pid = os.getpid()

    def __len__(self):
        return 4

    def __getitem__(self, row):
        if os.getpid() != self.creator_pid:
            raise OSError("damaged")
        return super().__getitem__(row)


class ColumnRows:
    """Rows of several columns."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, row):
        return tuple(column[row] for column in self.columns)


class PartlyUnreadableRows:
    """Eight rows of inputs (i, 1, 0) and targets i, of which the last three can't be read."""

    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row >= 5:
            raise OSError("unreadable")
        return np.array([row, 1.0, 0.0]), np.float64(row)
