"""Slices of sums over rows, and the queue from which the ranks of a chain take them."""

import mmap
import os
import time
from itertools import pairwise

import numpy as np
import pytest

pytensor = pytest.importorskip("pytensor", reason="the sum is PyTensor's Op")

import pytensor.tensor as pt  # noqa: E402
from library import HOSTS, XLA, function  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.data_objects.rows import get_share_slice  # noqa: E402
from synkhronos.extensions import row_slices  # noqa: E402
from synkhronos.extensions.chains import run_forked, set_chain  # noqa: E402
from synkhronos.extensions.rows_sum import sum_over_rows  # noqa: E402

ROWS = np.random.default_rng(5).normal(size=(1000, 3))
SIZES = [(1, 8, 1), (1, 8, 4), (7, 56, 4), (64, 10_752, 2), (100_000, 16_800_000, 4), (10**6, 168 * 10**6, 16)]


@pytest.mark.parametrize(
    "compute_bounds", [row_slices.compute_slice_bounds_by_rank, row_slices.compute_queued_slice_bounds]
)
@pytest.mark.parametrize("sizes", [*SIZES, (10**7, 4 * 10**10, 3), (5, 10**9, 2)])
def test_slices_divide_the_rows(compute_bounds, sizes):
    bounds = compute_bounds(*sizes)
    assert bounds[0] == 0 and bounds[-1] == sizes[0]
    assert all(start < stop for start, stop in pairwise(bounds))


@pytest.mark.parametrize("sizes", [*SIZES, (5, 10**9, 2)])
def test_slices_of_a_rank_are_its_share(sizes):
    n_rows, _, n_ranks = sizes
    bounds = row_slices.compute_slice_bounds_by_rank(*sizes)
    assert {get_share_slice(n_rows, n_ranks, rank).start for rank in range(n_ranks)} <= set(bounds)


@pytest.mark.parametrize("sizes", [*SIZES, (10**7, 4 * 10**10, 3)])
def test_queued_slices_become_smaller(sizes):
    n_rows, _, n_ranks = sizes
    lengths = np.diff(row_slices.compute_queued_slice_bounds(*sizes))
    assert (np.diff(lengths) <= 0).all()
    assert min(n_rows, n_ranks) <= len(lengths) <= row_slices.MAX_QUEUED_SLICES
    if n_rows > 10**5:
        assert lengths[-5:].max() < n_rows / n_ranks / 10


@pytest.mark.parametrize("n_rows", [1, 255, 257, 1000, 10**5, 10**7])
def test_slices_for_any_number_of_ranks_fit_into_the_queue(n_rows):
    for n_ranks in range(2, 257, 7 if n_rows > 10**5 else 1):
        lengths = np.diff(row_slices.compute_queued_slice_bounds(n_rows, 168 * n_rows, n_ranks))
        assert lengths.sum() == n_rows and lengths.min() > 0
        assert len(lengths) <= row_slices.MAX_QUEUED_SLICES
        assert lengths.max() <= 2 * -(-n_rows // n_ranks), n_ranks


def test_queue_gives_each_number_once_and_drops_old_ones():
    queue = row_slices.SliceQueue()
    assert list(queue) == []
    queue.fill(200)
    first = iter(queue)
    assert [next(first), next(iter(queue)), next(first)] == [0, 1, 2]
    queue.fill(3)
    assert list(queue) == [0, 1, 2]
    assert list(queue) == []


needs_chains = pytest.mark.skipif(XLA or bool(HOSTS), reason="chains need forked ranks of one host")


def evaluate_in_chain(f, points):
    """Return the results of a function at some points, or their errors, in a process with a chain's ranks."""

    def evaluate(_):
        set_chain(0, 1)
        for point in points:
            try:
                yield f(point)
            except (synk.WorkerError, AssertionError) as error:
                yield str(error)

    return list(run_forked(evaluate, 1))


@needs_chains
def test_sum_of_a_chain_has_equal_bits_whichever_rank_computes_a_slice(fork, monkeypatch):
    delays = np.random.default_rng()
    take = row_slices.SliceQueue.__iter__
    takers = np.frombuffer(mmap.mmap(-1, 4 * row_slices.MAX_QUEUED_SLICES), "int32")  # process that took each slice

    def take_late(self):
        for number in take(self):
            takers[number] = os.getpid()
            time.sleep(delays.uniform(0, 2e-3))
            yield number

    monkeypatch.setattr(row_slices, "_MIN_SLICE_NBYTES", 1)
    monkeypatch.setattr(row_slices.SliceQueue, "__iter__", take_late)
    fork(3)
    rows, scale = pt.dmatrix("rows"), pt.dvector("scale")
    total = sum_over_rows(pt.exp(rows @ scale), {rows: np.asfortranarray(ROWS)})
    f = function([scale], [total, pytensor.grad(total, scale)])
    points = [np.full(3, 0.1), np.full(3, 0.2)] * 8
    results = evaluate_in_chain(lambda point: (*f(point), takers.tobytes()), points)
    for point, (value, gradient, _) in zip(points, results, strict=True):
        terms = np.exp(ROWS @ point)
        np.testing.assert_allclose(value, terms.sum(), rtol=1e-12)
        np.testing.assert_allclose(gradient, terms @ ROWS, rtol=1e-9)
    for i in (0, 1):
        values, gradients, assignments = zip(*results[2 + i :: 2], strict=True)
        assert len(set(assignments)) > 1
        assert (
            len({value.tobytes() + gradient.tobytes() for value, gradient in zip(values, gradients, strict=True)}) == 1
        )


@needs_chains
def test_sum_of_a_chain_after_an_error_of_a_rank(fork, monkeypatch):
    monkeypatch.setattr(row_slices, "_MIN_SLICE_NBYTES", 1)
    fork(2)
    rows, scale = pt.dmatrix("rows"), pt.dscalar("scale")
    terms = pytensor.raise_op.Assert("too large")(rows * scale, pt.all(rows * scale < 10))
    f = function([scale], sum_over_rows(terms, {rows: ROWS}))
    largest = 9.9 / ROWS.max()
    points = [largest, largest / 2, 2 * largest, largest / 2, 3 * largest, largest]
    results = evaluate_in_chain(f, points)
    for i in (0, 1, 3, 5):
        np.testing.assert_allclose(results[i], points[i] * ROWS.sum(), rtol=1e-10)
    for i in (2, 4):
        assert "too large" in results[i]
