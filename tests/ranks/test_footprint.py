"""The library's resources stay constant, and two programs do not interfere."""

import gc
import os
import resource
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from library import NAME, shared, tensor

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks import Command

pytestmark = [pytest.mark.starts_programs, pytest.mark.faults]


def read_status(pid):
    with open(f"/proc/{pid}/status") as status:
        return dict(line.rstrip("\n").split(":", 1) for line in status)


def measure_footprint(pid):
    """Return a process's resident memory in kB, and counts of its other resources."""
    with open(f"/proc/{pid}/maps") as maps:
        shared_maps = sum(line.split()[1].endswith("s") for line in maps)
    status = read_status(pid)
    resources = {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "shared mappings": shared_maps,
        "threads": int(status["Threads"]),
    }
    return int(status["VmRSS"].split()[0]), resources


def measure_footprints():
    """Return the footprints of the master and the workers."""
    return [measure_footprint(pid) for pid in (os.getpid(), *ranks.get_session().worker_pids.values())]


class CountObjects(Command):
    """Command that returns each rank's number of objects after a garbage collection."""

    def run(self, rank):
        gc.collect()
        return rank.all_gather((len(rank.objects), len(rank.segments)))


class CountPageFaults(Command):
    """Command that returns each rank's page faults while it allocates and frees temporary arrays."""

    def run(self, rank):
        for turn in range(40):
            if turn == 20:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            temporaries = [np.full(100_000, float(turn)) for _ in range(4)]
            del temporaries
        return rank.all_gather(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def test_ranks_keep_the_memory_of_freed_arrays(fork):
    fork(3)
    assert max(ranks.get_session().run(CountPageFaults())) < 400  # each iteration needs 780 pages


def collect_garbage():
    """Collect garbage on all ranks; return each rank's numbers of objects and segments."""
    gc.collect()
    ranks.get_session().send_releases()
    return ranks.get_session().run(CountObjects())


def assert_footprint_constant(work, n_warm_up, n_repeats, max_growth_kb):
    """Check that ``work(n_repeats)`` leaves no rank with more objects, resources, or kB of memory than this."""
    work(n_warm_up)
    objects, footprints = collect_garbage(), measure_footprints()
    work(n_repeats)
    assert collect_garbage() == objects
    for (memory, resources), (new_memory, new_resources) in zip(footprints, measure_footprints(), strict=True):
        assert new_resources == resources
        assert new_memory - memory < max_growth_kb


def test_hundreds_of_functions_do_not_leak(two_ranks_per_test):
    x = tensor.dvector("x")
    w = shared(np.zeros(3), "w")  # not dropped
    options = {"mode": "FAST_COMPILE"}

    def make_functions(count):
        for i in range(0, count, 50):
            functions = []
            for _ in range(50):
                state = shared(np.zeros(10_000), "state")
                functions.append(
                    synk.function([x], (x.sum() + state.sum() + w.sum(), "sum"), updates=[(state, state)], **options)
                )
            synk.distribute()
            assert functions[i // 50 % 50](np.arange(4.0)) == 6
            del functions, state
            collect_garbage()  # otherwise the amount of garbage would vary

    make_functions(200)
    n_objects = len(gc.get_objects())
    assert_footprint_constant(make_functions, 0, 400, max_growth_kb=16_000)  # of 32 MB in shared variables
    gc.collect()
    assert len(gc.get_objects()) - n_objects < 400


def test_calls_and_collectives_do_not_leak(two_ranks_per_test):
    x, s = tensor.dmatrix("x"), shared(np.zeros((50, 40)), "s")
    f = synk.function([x], [(x.sum(axis=0), "mean"), (x * 2, "gather")], updates=[(s, s + 1)])

    def make_calls(count):
        for i in range(count):
            f(np.ones((20 + i % 50, 40)), batch=list(range(i % 20)), num_slices=1 + i % 3)
            synk.all_reduce(s, "max")
            synk.scatter(s, np.ones((60, 40)), batch=list(range(i % 60)))
            synk.broadcast(s, np.zeros((50, 40)))
            synk.gather(s)

    assert_footprint_constant(make_calls, 50, 200, max_growth_kb=4_000)


PROGRAM = f"""
    import sys
    import numpy as np
    import {NAME} as library, {NAME}.tensor as tensor
    import synkhronos as synk

    n, offset = int(sys.argv[1]), float(sys.argv[2])
    synk.fork(n, use_gpu=False)
    x, w = tensor.dmatrix("x"), library.shared(np.full(5, offset), "w")
    f = synk.function([x], [(x.sum(axis=0) + 0 * w, "sum"), (x + w, "gather")], updates=[(w, w + 1)])
    d = synk.data(np.full((30, 5), offset))
    print("ready", flush=True)
    for line in sys.stdin:
        for i in range(int(line)):
            total, rows = f(d)
            assert (total == 30 * offset).all(), total
            assert (rows == offset + w.get_value()[0] - 1).all(), rows
            synk.all_reduce(w, "max")
            assert (synk.gather(w) == w.get_value()).all()
            d.set_value(np.full((30 + i % 7, 5), offset))
            d.set_length(30)
            d[:] = offset
        print("right", flush=True)
    synk.close()
    print("closed", flush=True)
"""


def test_fork_in_two_programs_does_not_interfere():
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(n), str(offset)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,  # no module is compiled by both
                "PYTENSOR_FLAGS": "mode=Mode,linker=py,optimizer=None",
                "THEANO_FLAGS": "blas.ldflags=,mode=Mode,linker=py,optimizer=None",
            },
        )
        for n, offset in ((2, 1.0), (3, -7.0))
    ]
    first, second = programs

    def request_calls(program, count):
        program.stdin.write(f"{count}\n")
        program.stdin.flush()

    try:
        for program in programs:
            assert program.stdout.readline() == "ready\n"
        for program in programs:  # both run at the same time
            request_calls(program, 25)
        for program in programs:
            assert program.stdout.readline() == "right\n"
        request_calls(second, 25)
        first.stdin.close()  # ends while the other is computing
        assert first.stdout.readline() == "closed\n"
        assert first.wait(60) == 0
        assert second.stdout.readline() == "right\n"
        request_calls(second, 10)
        assert second.stdout.readline() == "right\n"
        second.stdin.close()
        assert second.stdout.readline() == "closed\n"
        assert second.wait(60) == 0
    finally:
        for program in programs:
            program.kill()
            program.wait()
            program.stdout.close()
            if not program.stdin.closed:
                program.stdin.close()
