"""Code for GPUs without a GPU: choice of devices, collectives and their failures, page-locked memory."""

import ctypes
import os
import sys
import threading
import time
import types
from functools import partial

import numpy as np
import pytest
from library import NAME
from system import run_code, run_on_fake_gpus, wait_until

import synkhronos as synk
from synkhronos import devices, ranks
from synkhronos.data_objects.data_access import get_array_location
from synkhronos.devices import JAX, PYGPU, cuda
from synkhronos.devices.cuda.gpu_context import GpuContext
from synkhronos.devices.cuda.nccl import NcclGroupCommunicator
from synkhronos.devices.cuda.pinned_memory import PinnedMemory, PinnedRing, PinnedSegments
from synkhronos.devices.jax.xla_communicator import BufferSpan, XlaCommunicator
from synkhronos.engines.xla.fused_runner import NcclLaunchCollectives
from synkhronos.patching import set_environment
from synkhronos.ranks import Cancelled

# -- GPUs by rank, and hints for installing --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "size", "root", "mine", "expected"),
    [
        (None, 3, 0, None, ["0", "1", "2"]),
        ("3,1,2", 2, 0, None, ["3", "1"]),
        (" 3, GPU-ab ", 2, 1, None, ["3", "GPU-ab"]),
        (None, 3, 2, "0", ["1", "2", "0"]),  # the master keeps its GPU
        ("3,1,2", 2, 0, "1", ["1", "3"]),
        (None, 2, 1, "7", ["0", "1"]),
    ],
)
def test_choose_gpus_gives_each_rank_a_gpu(monkeypatch, visible, size, root, mine, expected):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = type(JAX)()
    device._gpu = mine
    assert device.choose_gpus(size, root) == expected


@pytest.mark.parametrize("first", ["pass", "import jax"])
def test_jax_is_forced_on_the_cpu_before_and_after_its_import(first):
    code = f"""
        {first}
        import os
        from synkhronos import devices
        devices.get_n_gpu = lambda: 1
        devices.force_jax_on_cpu()
        import jax
        print(jax.config.jax_platforms)
        devices.force_jax_on_cpu()
        devices.undo_force_jax_on_cpu()
        print(jax.config.jax_platforms, os.environ.get("JAX_PLATFORMS") or None)
    """
    assert run_code(code, JAX_PLATFORMS="").split() == ["cpu", "None", "None"]
    assert run_code(code, JAX_PLATFORMS="cuda,cpu").split() == ["cpu", "cuda,cpu", "cuda,cpu"]


@pytest.mark.parametrize("first", ["import jax", "pass"])
def test_platforms_that_the_user_sets_after_a_fork_are_kept(first):
    code = f"""
        {first}
        import os
        from synkhronos import devices
        devices.get_n_gpu = lambda: 1
        devices.force_jax_on_cpu()
        if {first!r} == "pass":
            os.environ["JAX_PLATFORMS"] = "cuda"
        else:
            jax.config.update("jax_platforms", "cuda")
        devices.undo_force_jax_on_cpu()
        import jax
        print(jax.config.jax_platforms, os.environ["JAX_PLATFORMS"])
    """
    assert run_code(code, JAX_PLATFORMS="").split() == ["cuda", "cuda"]


@pytest.mark.parametrize("setting", ["pass", "jax.config.update('jax_platforms', 'cpu')"])
def test_platforms_that_exclude_gpus_are_refused(setting):
    code = f"""
        import jax
        from synkhronos.devices import JAX
        {setting}
        try:
            JAX.open_gpu("0")
        except RuntimeError as error:
            print(error)
    """
    printed = run_code(code, JAX_PLATFORMS="cpu" if setting == "pass" else "")
    expected = (
        "JAX computes on 'cpu' although GPU 0 is visible: JAX_PLATFORMS is 'cpu': remove it, or pass use_gpu=False"
    )
    assert printed.strip() == expected


@pytest.mark.parametrize("before", [None, "1,0"])
def test_environment_is_set_in_a_block(monkeypatch, before):
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with pytest.raises(KeyError), set_environment(CUDA_VISIBLE_DEVICES="1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        raise KeyError
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_missing_gpu_packages_are_named():
    needed = {
        ("json", "no_such_module"): "either",
        ("no_such_module", "no.such.module"): "this one",
        ("os.path",): "os",
    }
    assert cuda.find_missing_packages(needed) == ["this one"]


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [({}, PYGPU), ({"__served_on__": "pytensor"}, JAX)],
)
def test_fork_chooses_the_device_by_the_loaded_library(monkeypatch, loaded, expected):
    module = types.ModuleType("theano")
    vars(module).update(loaded)
    monkeypatch.setitem(sys.modules, "theano", module)
    assert devices._choose_gpu_device() is expected


def test_theano_keeps_an_opened_gpu(monkeypatch):
    monkeypatch.setattr(PYGPU, "_gpu", "0")
    with pytest.raises(RuntimeError, match="can't go back to the CPU"):
        synk.fork(2, use_gpu=False)


def test_integer_vectors_stay_on_the_host():
    gpu_types = [("float32", 0), ("float64", 4), ("uint8", 4), ("int64", 2)]
    host_types = [("int32", 1), ("bool", 0), ("complex64", 3)]
    assert [PYGPU.accepts_input(np.dtype(dtype), ndim) for dtype, ndim in [*gpu_types, *host_types]] == 4 * [
        True
    ] + 3 * [False]


# -- pending collectives ------------------------------------------------------------------------------------------

DONE, NOT_READY = 0, 600


class Gpu:
    """Fake of CUDA, NCCL and a rank: a collective is pending until the test completes it."""

    def __init__(self, is_master=True, valid_flags=None):
        self.state, self.aborted, self.entered, self.is_dead = DONE, 0, 0, False
        self.failed = 0
        self.has_room = threading.Event()
        self.has_room.set()
        self.command_number, self.is_master, self.size, self.number = 0, is_master, 2, 0
        self.pending_operations = []
        self.barriers = self
        self.stream = self.copy_stream_handle = 7
        self.next_number, self.arrived = 3, 0
        self.host_mark = np.zeros(1, np.int32)
        self.control = types.SimpleNamespace(valid_flags=np.ones(16, np.int32) if valid_flags is None else valid_flags)
        self.spans_hosts = False
        #: Marks that the stream writes when its earlier work is done.
        self.pending_marks = []
        self.array_device = self
        self.CUresult = types.SimpleNamespace(CUDA_SUCCESS=DONE, CUDA_ERROR_NOT_READY=NOT_READY)
        #: Results of the next queries of the stream.
        self.query_results = []
        self.driver = self

    def cuStreamQuery(self, stream):  # noqa: N802 - CUDA's name
        assert stream == 7
        self.has_room.wait(10)
        if self.query_results:
            self.state = self.query_results.pop(0)
        return (self.state,)

    def write_mark(self, stream, mark):
        assert stream == 7
        self.pending_marks.append(mark)

    def pin_pages(self, *arguments):
        """Do nothing, as `unpin_pages`: the fake reads all memory."""

    unpin_pages = pin_pages

    def set_current_gpu(self):
        self.entered += 1

    @property
    def last_failed_command(self):
        return self.failed

    def has_peer_died(self):
        return self.is_dead

    def arrive_and_wait(self):
        try:
            self.poll()
        except Cancelled:
            if not self.wait_and_check_all_reached(self.next_number):
                raise
        self.arrived = self.next_number

    def poll(self):
        """Called in the wait of `arrive_and_wait`."""

    def read_last_common_barrier(self, command):
        assert command == 5
        return self.arrived

    def wait_and_check_all_reached(self, barrier_number):
        assert barrier_number == 3
        return self.arrived >= barrier_number

    def check_cancelled(self):
        if self.is_dead:
            raise synk.WorkerError("a peer has died", 1)

    def get_address(self, array):
        return array.ctypes.data

    def all_reduce(self, source, target, count, dtype, op, handle, stream):
        assert (source, count, dtype, op, stream) == (target, 3, 7, 0, 7)
        self.state = NOT_READY

    def comm_get_async_error(self, handle):
        return 0

    def abort(self):
        self.aborted += 1
        self.state = DONE


@pytest.fixture
def connected(monkeypatch):
    """Give a function that connects a communicator to a fake GPU."""
    communicators = []

    def connect(**kwargs):
        gpu = Gpu(**kwargs)
        for name, module in {
            "nccl": types.ModuleType("nccl"),
            "nccl.bindings": types.ModuleType("nccl.bindings"),
        }.items():
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["nccl.bindings"].nccl = gpu
        communicator = XlaCommunicator(gpu, gpu)
        connection = communicator._connection
        connection._comm, connection._handle, connection.generation = gpu, 1, 1
        communicators.append(communicator)
        return communicator, gpu

    for module in ("cuda.nccl", "cuda.nccl_connection", "jax.xla_communicator"):
        monkeypatch.setattr(f"synkhronos.devices.{module}.unwrap_cuda_result", lambda results: None)
    yield connect
    for communicator in communicators:
        communicator._watchdog.close()


def start_all_reduce(communicator, gpu, command=5):
    gpu.command_number = command
    communicator.all_reduce(np.ones(3, "float32"), "sum")


def test_all_reduce_returns_before_the_stream_ends(connected):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu)
    assert gpu.state == NOT_READY and gpu.pending_operations[0].has_writes_at_risk()
    gpu.state = DONE
    assert not gpu.pending_operations[0].has_writes_at_risk()


def test_all_reduce_of_few_bytes_is_waited_for(connected, monkeypatch):
    communicator, gpu = connected()
    monkeypatch.setattr("synkhronos.devices.cuda.nccl._QUICK_SECONDS", 10.0)
    gpu.command_number = 5
    gpu.query_results = [DONE, NOT_READY, NOT_READY, DONE]
    for _ in range(2):  # they are waited for together
        communicator.all_reduce(np.ones(3, "float32"), "sum")
    assert communicator.wait_briefly()
    assert not gpu.query_results and not gpu.pending_operations[0].has_writes_at_risk()
    communicator.all_reduce(np.ones(0, "float32"), "sum")  # of an empty array
    assert communicator.wait_briefly()


@pytest.mark.parametrize(
    ("query_results", "left"),
    [
        ([NOT_READY, DONE], [DONE]),  # another computation precedes it, and is not waited for
        ([DONE, 700, DONE], [DONE]),  # an error, which is raised when JAX's array is read
        ([DONE], []),  # not complete yet
    ],
)
def test_all_reduce_on_a_busy_stream_is_not_waited_for(connected, query_results, left):
    communicator, gpu = connected()
    gpu.command_number, gpu.query_results = 5, query_results
    communicator.all_reduce(np.ones(3, "float32"), "sum")
    assert not communicator.wait_briefly()
    assert gpu.query_results == left


def test_all_reduce_fails_when_aborted_meanwhile(connected, monkeypatch):
    communicator, gpu = connected()
    gpu.command_number, gpu.query_results = 5, [DONE]
    monkeypatch.setattr("synkhronos.devices.cuda.nccl._QUICK_SECONDS", 10.0)
    threading.Timer(0.1, communicator._watchdog.abort).start()  # then the stream is idle
    communicator.all_reduce(np.ones(3, "float32"), "sum")
    assert not communicator.wait_briefly()
    assert gpu.aborted == 1


def test_failed_command_aborts_its_collectives(connected):
    communicator, gpu = connected(is_master=False)
    start_all_reduce(communicator, gpu, command=5)
    resolve = gpu.pending_operations[0].resolve_failed_command
    resolve(4)
    assert not gpu.aborted and communicator.generation == 1
    resolve(5)
    assert gpu.aborted == 1 and communicator.generation == 0
    resolve(5)
    assert gpu.aborted == 1


@pytest.mark.parametrize("ending", ["the GPU has written the mark", "a peer has died"])
def test_failed_command_aborts_nothing_of_earlier_commands(connected, ending):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu, command=4)
    communicator.wait_until_started()
    assert not gpu.pending_marks
    start_all_reduce(communicator, gpu, command=5)  # while the first one is in progress
    (mark,) = gpu.pending_marks
    assert mark != gpu.host_mark[0]
    gpu.arrived = 0
    resolve = threading.Thread(target=gpu.pending_operations[0].resolve_failed_command, args=(5,))
    resolve.start()
    resolve.join(0.05)
    assert resolve.is_alive() and not gpu.aborted
    if ending == "a peer has died":
        gpu.is_dead = True
    else:
        gpu.host_mark[0] = mark
    resolve.join(5)
    assert not resolve.is_alive() and gpu.aborted


def test_late_abort_leaves_the_collectives_of_the_next_command(connected):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu, command=4)
    communicator.wait_until_started()
    start_all_reduce(communicator, gpu, command=5)

    def go_on():
        """Abort, and start the next command, as the main thread may while the other one waits for the mark."""
        if threading.current_thread() is late_thread and not gpu.aborted:
            gpu.host_mark[0] = gpu.pending_marks[0]
            communicator.abort()
            connection = communicator._connection
            connection._comm, connection._handle, connection.generation = gpu, 1, 1
            start_all_reduce(communicator, gpu, command=6)
        return False

    gpu.has_peer_died = go_on
    late_thread = threading.Thread(target=communicator.abort)
    late_thread.start()
    late_thread.join(5)
    assert not late_thread.is_alive() and gpu.aborted == 1


def test_differing_digests_abort_nothing_of_earlier_commands(connected):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu, command=4)
    communicator.wait_until_started()
    start_all_reduce(communicator, gpu, command=5)
    aborted_at = []
    gpu.abort = lambda: aborted_at.append(int(gpu.host_mark[0]))
    threading.Timer(0.05, gpu.host_mark.fill, gpu.pending_marks).start()
    communicator.abort()
    assert aborted_at == gpu.pending_marks


def test_master_aborts_nccl_after_a_worker_died(connected):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu)
    time.sleep(0.1)
    assert not gpu.aborted
    gpu.is_dead = True
    wait_until(lambda: gpu.aborted)
    assert gpu.aborted == 1
    # The outputs are invalid: reading them raises an error that the collective did not finish.
    assert gpu.pending_operations[0].has_writes_at_risk()


@pytest.mark.parametrize("has_died", [True, False])
def test_abort_frees_a_launch_on_a_full_stream(connected, has_died):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu)
    gpu.has_room.clear()  # as while another thread waits in a CUDA call
    time.sleep(0.1)
    if has_died:
        gpu.is_dead = True
    else:
        gpu.failed = 5
    wait_until(lambda: gpu.aborted)
    assert gpu.aborted == 1
    gpu.has_room.set()


def test_event_queries_are_serialized(connected, monkeypatch):
    monkeypatch.setattr("synkhronos.devices.cuda.watchdog.STUCK_TIMEOUT_SECONDS", 0.05)
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu)
    gpu.has_room.clear()
    assert not communicator._watchdog._query_idle()
    query_thread = communicator._watchdog._query_thread
    assert [communicator._watchdog._query_idle() for _ in range(4)] == [False] * 4
    assert communicator._watchdog._query_thread is query_thread and query_thread.is_alive()
    gpu.state = DONE
    gpu.has_room.set()
    query_thread.join(5)
    assert communicator._watchdog._query_idle()


def test_idle_worker_death_aborts_nothing(connected):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu)
    gpu.state = DONE
    time.sleep(0.1)
    gpu.is_dead = True
    time.sleep(0.1)
    assert not gpu.aborted and not gpu.pending_operations[0].has_writes_at_risk()


def test_close_waits_for_pending_collectives(connected):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu)
    finish = gpu.pending_operations[0].finish
    # The failure of a later command does not concern this collective.
    gpu.failed = 6
    timer = threading.Timer(0.1, lambda: setattr(gpu, "state", DONE))
    timer.start()
    finish()
    assert gpu.state == DONE and not gpu.aborted
    timer.join()
    start_all_reduce(communicator, gpu)
    gpu.is_dead = True
    finish()  # not any more: no other rank will start it


@pytest.mark.parametrize("is_master", [True, False])
def test_peer_failure_frees_a_rank_waiting_for_its_gpu(connected, is_master):
    communicator, gpu = connected(is_master=is_master)
    start_all_reduce(communicator, gpu, command=5)
    gpu.failed = 4
    time.sleep(0.1)
    assert not gpu.aborted
    gpu.failed = 5
    wait_until(lambda: gpu.aborted)
    assert gpu.aborted == 1 and communicator.generation == 0


def test_failure_after_the_last_barrier_aborts_nothing(connected):
    communicator, gpu = connected()
    barriers = []
    gpu.arrive_and_wait = lambda: (barriers.append(1), setattr(gpu, "arrived", 3))
    communicator.wait_until_started()
    assert barriers == []  # nothing has been started
    start_all_reduce(communicator, gpu, command=5)
    communicator.wait_until_started()
    assert barriers == [1]
    gpu.failed = 5
    time.sleep(0.1)
    gpu.pending_operations[0].resolve_failed_command(5)
    assert not gpu.aborted and gpu.pending_operations[0].has_writes_at_risk()


def all_reduce_in_launch(communicator, gpu, count=3, command=5):
    """All-reduce in the middle of a launch; return the copies that the stream makes afterwards."""
    copied = []
    gpu.cuMemcpyAsync = lambda *arguments: copied.append(arguments)
    gpu.command_number = command
    communicator.enqueue_on_xla_stream([(64, 64, count, "float32")], "sum", 96, 7)
    return copied


def test_launch_all_reduce_is_valid_unless_aborted(connected):
    communicator, gpu = connected()
    (copied,) = all_reduce_in_launch(communicator, gpu)
    # The GPU reads the flag after the all-reduce; a missing peer may be found by then.
    flag = gpu.control.valid_flags[1:2]
    assert copied == (96, flag.ctypes.data, 4, 7) and flag[0] == 1
    # After an abort no wrong value is visible, unless the collective writes in place.
    assert not gpu.pending_operations[0].has_writes_at_risk()
    communicator._watchdog.writes_in_place = True
    assert gpu.pending_operations[0].has_writes_at_risk()
    gpu.abort = lambda: events.append(int(flag[0]))  # a kernel that waits for a peer continues from here
    events = []
    gpu.failed = 5
    wait_until(lambda: events)
    assert events == [0] and communicator.generation == 0


def test_abort_invalidates_the_collectives_of_ranks_that_start_later(connected):
    valid_flags = np.ones(16, np.int32)
    (first, first_gpu), (second, _) = [connected(valid_flags=valid_flags) for _ in range(2)]
    for communicator, gpu in (first, first_gpu), (second, second._gpu):
        all_reduce_in_launch(communicator, gpu, command=4)
        communicator.wait_until_started()
    (copied,) = all_reduce_in_launch(first, first_gpu, command=5)
    first_gpu.arrived = 0
    first_gpu.pending_operations[0].resolve_failed_command(5)
    assert first_gpu.aborted
    # The abort lets NCCL complete the second rank's all-reduce with arbitrary values.
    (copied_later,) = all_reduce_in_launch(second, second._gpu, command=5)
    assert copied_later == copied and valid_flags.tolist() == [1, 1, 0] + 13 * [1]


def test_launch_all_reduce_after_abort_is_invalid(connected):
    communicator, gpu = connected()
    communicator._watchdog.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        all_reduce_in_launch(communicator, gpu)
    assert gpu.state == DONE


@pytest.fixture
def streams(connected):
    """Connect; return a communicator, and the list that records the entries of streams 7 and 8."""
    communicator, gpu = connected()
    events = []
    gpu.side_stream, gpu.event = 8, "event"
    gpu.order_after = lambda stream, earlier: events.extend([f"record {earlier}", f"{stream} waits"])
    gpu.cuMemcpyAsync = lambda *arguments: events.append(f"flag {arguments[-1]}")
    gpu.all_reduce = lambda *arguments: events.append(f"{arguments[2]} items of {arguments[3]} on {arguments[-1]}")
    gpu.command_number = 5
    return communicator, events


def test_launch_all_reduce_of_chunks_overlaps_and_is_joined(streams):
    communicator, events = streams
    communicator.enqueue_on_side_stream([(64, 64, 3, "float32")], "sum", 7)
    assert events == ["record 7", "8 waits", "3 items of 7 on 8"]
    events.clear()
    communicator.enqueue_on_xla_stream([(96, 96, 2, "bfloat16"), (98, 98, 1, "float32")], "sum", 128, 7)
    assert events == ["record 8", "7 waits", "2 items of 9 on 7", "1 items of 7 on 7", "flag 7"]
    events.clear()
    communicator.enqueue_on_xla_stream([(96, 96, 2, "float32")], "sum", 128, 7)
    assert events == ["2 items of 7 on 7", "flag 7"]  # nothing was started since


def test_launch_all_reduce_needs_agreement_of_all_ranks(streams):
    communicator, events = streams
    handler = NcclLaunchCollectives(types.SimpleNamespace(), communicator, "sum", (5,), is_repeated=False)
    handler.start([BufferSpan(64, 64, 3, "float32")], 7)
    events.clear()
    with pytest.raises(ValueError, match="expected 5 items, as before the launch, got 4"):
        handler.finish([BufferSpan(96, 96, 1, "float32")], 128, 7)
    assert events == ["record 8", "7 waits"]  # the written memory may be reused next
    handler.start([BufferSpan(64, 64, 3, "float32")], 7)
    handler.finish([BufferSpan(96, 96, 2, "float32")], 128, 7)
    assert events[-1] == "flag 7"


def test_rank_past_the_barrier_aborts_no_peer(connected):
    communicator, gpu = connected()
    gpu.arrive = lambda: setattr(gpu, "has_come", True)
    communicator.notify_started()
    assert not hasattr(gpu, "has_come")  # no collective was started that a rank would wait for
    start_all_reduce(communicator, gpu, command=5)
    communicator.notify_started()
    assert gpu.has_come
    gpu.arrived = 2
    gpu.pending_operations[0].resolve_failed_command(5)  # another rank failed before it arrived
    assert gpu.aborted == 1
    communicator, gpu = connected()
    gpu.arrive = lambda: setattr(gpu, "arrived", 3)
    start_all_reduce(communicator, gpu, command=5)
    communicator.notify_started()
    gpu.pending_operations[0].resolve_failed_command(5)  # after all ranks arrived
    assert not gpu.aborted


@pytest.mark.skipif(NAME != "pytensor", reason="Theano's arrays are all-reduced between launches")
@pytest.mark.slow
def test_training_step_is_one_launch_with_all_reduce():
    printed = run_on_fake_gpus("train_in_one_launch", 3)
    # 2,872 items, cut between parameters, the last parameter first: of an average, weights and bias 72, then 1600, then
    # 1200.
    float32_step = "started 1672 of float32; all-reduced 1200 of float32; "
    bfloat16_step = "started 1640 of bfloat16; all-reduced 1200 of bfloat16; all-reduced 32 of float32; "
    connection = "all-reduced 1 of uint8; "  # the first collective, which tries the connection
    user_calls = f"{[[162.0] * 3] * 3} " + "all-reduced 3 of float32; " * 4
    assert printed == [lines.rstrip() for lines in (connection + float32_step * 3, bfloat16_step * 3, user_calls)]


def test_abort_spares_collectives_that_all_ranks_reached(connected):
    # A rank may fail after the barrier, and others may be cancelled before they leave it.
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu, command=5)

    def fails():
        gpu.failed = 5
        time.sleep(0.1)  # the watchdog polls meanwhile
        assert not gpu.aborted

    gpu.arrived, gpu.poll = 3, fails
    communicator.wait_until_started()
    gpu.pending_operations[0].resolve_failed_command(5)
    assert not gpu.aborted


@pytest.mark.parametrize("error", [Cancelled, KeyboardInterrupt])
@pytest.mark.parametrize("have_all_come", [False, True])
def test_abort_of_started_collectives_is_collective(connected, error, have_all_come):
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu, command=5)

    def fails():
        raise error

    gpu.arrived, gpu.poll = 3 if have_all_come else 2, fails
    if have_all_come and error is Cancelled:
        communicator.wait_until_started()
    else:
        with pytest.raises(error):
            communicator.wait_until_started()
    gpu.pending_operations[0].resolve_failed_command(5)
    assert gpu.aborted == (0 if have_all_come else 1)


def test_failed_command_ends_all_waits(connected, monkeypatch):
    monkeypatch.setattr("synkhronos.devices.cuda.watchdog.ABORT_TIMEOUT_SECONDS", 1.0)
    communicator, gpu = connected()
    start_all_reduce(communicator, gpu, command=5)
    communicator.wait_until_started()
    gpu.failed = 5
    time.sleep(0.1)
    assert not gpu.aborted
    wait_until(lambda: gpu.aborted)
    assert gpu.aborted == 1


def test_aborted_connection_is_not_used(connected):
    communicator, gpu = connected()
    communicator._watchdog.abort()
    with pytest.raises(RuntimeError, match="the connection between the ranks' GPUs was aborted"):
        start_all_reduce(communicator, gpu)
    gpu.is_dead = True
    with pytest.raises(synk.WorkerError, match="a peer has died"):
        start_all_reduce(communicator, gpu)
    assert gpu.state == DONE


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_abort_waits_for_running_nccl_calls(connected, monkeypatch, seconds):
    communicator, gpu = connected()
    called, let_go, aborted_then = threading.Event(), threading.Event(), []

    def all_reduce(*arguments):
        called.set()
        let_go.wait(seconds)
        aborted_then.append(gpu.aborted)

    monkeypatch.setattr(gpu, "all_reduce", all_reduce)
    monkeypatch.setattr(gpu, "abort", lambda: (Gpu.abort(gpu), let_go.set()))
    caller = threading.Thread(target=start_all_reduce, args=(communicator, gpu))
    caller.start()
    called.wait()
    communicator._watchdog.abort()
    caller.join()
    assert aborted_then == [0 if seconds < 0.5 else 1] and gpu.aborted == 1


def test_late_connection_is_discarded(connected, monkeypatch):
    communicator, gpu = connected()
    late = Gpu()
    core = types.ModuleType("nccl.core")
    core.UniqueId = types.SimpleNamespace(from_bytes=bytes)
    late._comm = 9

    def init(size, number, unique_id):
        communicator._watchdog.abort()  # the timeout has expired meanwhile
        return late

    core.Communicator = types.SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    errors = []
    gpu.allocate_scratch = lambda nbytes: 64
    communicator._connection.members = (0, 1)
    communicator._connection._init_and_warm_up(communicator._connection._attempt, b"id", errors)
    assert (errors, late.aborted, communicator._connection._comm) == ([], 1, None)


def connect_group(communicator, gpu):
    """Connect a group besides all ranks; return it, and the list that records later aborts."""
    group, events = NcclGroupCommunicator(communicator), []

    def abort(name):
        events.append(name)
        gpu.state = DONE

    for owner, name in ((communicator, "all"), (group, "group")):
        connection = owner._connection
        connection._comm, connection._handle = types.SimpleNamespace(abort=partial(abort, name)), 1
        connection.generation, connection.members = 1, (0, 1)
    gpu.command_number = 5
    return group, events


def test_group_collective_waits_for_pending_ones(connected):
    communicator, gpu = connected()
    group, events = connect_group(communicator, gpu)
    start_all_reduce(communicator, gpu)
    states = []

    def send(*arguments):
        states.append(gpu.state)
        gpu.state = NOT_READY
        threading.Timer(0.1, setattr, (gpu, "state", DONE)).start()

    gpu.send = send
    threading.Timer(0.1, setattr, (gpu, "state", DONE)).start()
    group.send(np.ones(3, "float32"), 1)
    assert states == [DONE] and gpu.state == DONE and events == []


def test_abort_begins_with_blocked_connections(connected):
    # Aborting an idle connection frees memory, and CUDA would wait for the blocked one before it does.
    communicator, gpu = connected()
    group, events = connect_group(communicator, gpu)
    start_all_reduce(communicator, gpu)
    communicator._watchdog.close()
    assert events == ["all", "group"]
    group, events = connect_group(communicator, gpu)
    gpu.is_dead = True
    with pytest.raises(synk.WorkerError, match="a peer has died"):
        group.all_reduce(np.ones(3, "float32"), "sum")
    assert events == ["group"] and communicator.generation == 1
    group, events = connect_group(communicator, gpu)
    communicator._watchdog.mark_started(group._connection)  # the ranks are ended before this rank polls
    communicator._watchdog.close()
    assert events == ["group", "all"]


def test_group_collective_result_is_invalid_after_abort(connected):
    communicator, gpu = connected()
    group, events = connect_group(communicator, gpu)
    threading.Timer(0.1, communicator._watchdog.abort).start()  # as the watchdog's thread does
    with pytest.raises(RuntimeError, match="aborted"):
        group.all_reduce(np.ones(3, "float32"), "sum")
    assert events == ["group"]


def test_failure_ends_group_connections_only(connected):
    communicator, gpu = connected()
    group, events = connect_group(communicator, gpu)
    gpu.pending_operations[0].resolve_failed_command(5)
    assert events == ["group"] and (communicator.generation, group.generation) == (1, 0)


# -- page-locked memory ------------------------------------------------------------------------------------------


class Driver:
    """Fake of CUDA's driver, which records page-locked memory."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED=712)

    def __init__(self):
        self.locked = {}

    def cuMemHostRegister(self, address, nbytes, flags):  # noqa: N802 - CUDA's name
        assert flags == 3
        if address in self.locked:
            return (712,)
        self.locked[address] = nbytes
        return (0,)

    def cuMemHostUnregister(self, address):  # noqa: N802 - CUDA's name
        # Unmapped memory can't be read.
        ctypes.string_at(address, 1)
        return (0 if self.locked.pop(address, None) else 713,)


@pytest.fixture
def gpu_context(monkeypatch):
    """Return the context of a driver that records its calls."""
    monkeypatch.setattr(
        "synkhronos.devices.cuda.gpu_context.unwrap_cuda_result", lambda results: pytest.fail() if results[0] else None
    )
    context = object.__new__(GpuContext)
    context.driver, context.set_current_gpu = Driver(), lambda: None
    return context


def test_pages_are_unlocked_before_they_are_unmapped(gpu_context, two_ranks_per_test):
    rank, segments = ranks.get_session().rank, PinnedSegments(gpu_context)
    arrays = [synk.data(np.ones(n)) for n in (10, 5000, 3)]
    keys = [get_array_location(array).segment_key for array in arrays]
    for key in keys:
        assert segments.pin(rank, key) == segments.pin(rank, key)
    assert len(gpu_context.driver.locked) == len(rank.segments.before_unmap_callbacks) + 2 == 3
    del arrays[1]
    ranks.get_session().send_releases()
    assert len(gpu_context.driver.locked) == len(segments._addresses) == 2
    synk.close()
    assert not gpu_context.driver.locked and not segments._addresses


def test_pages_left_locked_by_an_interrupt_are_locked_again(gpu_context):
    memory = np.zeros(10, np.uint8)
    gpu_context.pin_pages(memory.ctypes.data, 5)
    gpu_context.pin_pages(memory.ctypes.data, 10)
    assert gpu_context.driver.locked == {memory.ctypes.data: 10}
    gpu_context.unpin_pages(memory.ctypes.data)
    gpu_context.unpin_pages(memory.ctypes.data)  # a repeated call does nothing
    assert not gpu_context.driver.locked


def test_vectors_in_transfer_are_not_moved(gpu_context):
    pinned = PinnedMemory(gpu_context)
    vectors = [np.arange(1 << 17) * k for k in (1, 2, 3)]
    places = [pinned.store(vector) for vector in vectors]
    assert len(gpu_context.driver.locked) == 2  # the third did not fit
    for place, vector in zip(places, vectors, strict=True):
        stored = (ctypes.c_int64 * vector.size).from_address(place)
        np.testing.assert_array_equal(np.ctypeslib.as_array(stored), vector)
    pinned.used_nbytes = 0  # all ranks have arrived
    pinned.store(vectors[0])
    assert len(gpu_context.driver.locked) == 1


def test_a_ring_overwrites_vectors_after_their_copies(gpu_context):
    recorded, waited_for = [], []

    def record_event():
        event = types.SimpleNamespace(sync=lambda: waited_for.append(event))
        recorded.append(event)
        return event

    gpu_context.record_event = record_event
    ring, vector = PinnedRing(gpu_context), np.arange(1 << 15)  # a half has four of them
    addresses = [ring.store(vector) for _ in range(8)]
    assert len(set(addresses)) == 8 and not waited_for
    assert ring.store(vector) == addresses[0] and waited_for == recorded[:1]
    ring.store(np.arange(1 << 18))  # larger than a half
    assert waited_for == recorded[:2]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_unlockable_memory_is_not_used(gpu_context, monkeypatch, error):
    pinned, vector = PinnedMemory(gpu_context), np.arange(1 << 17)
    lock = gpu_context.pin_pages

    def fails(address, nbytes):
        lock(address, nbytes)
        raise error

    pinned.store(vector)
    for _ in range(3):
        monkeypatch.setattr(gpu_context, "pin_pages", fails)
        with pytest.raises(error):
            pinned.store(np.arange(1 << 19))
        monkeypatch.setattr(gpu_context, "pin_pages", lock)
        pinned.used_nbytes = 0
        place = pinned.store(vector)
        assert list(gpu_context.driver.locked) == [pinned._memory.ctypes.data] and place == pinned._memory.ctypes.data


def test_unlockable_segment_is_forgotten(gpu_context, monkeypatch, two_ranks_per_test):
    rank, array, segments = ranks.get_session().rank, synk.data(np.ones(10)), PinnedSegments(gpu_context)
    lock = gpu_context.pin_pages

    def interrupted(address, nbytes):
        lock(address, nbytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_context, "pin_pages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        segments.pin(rank, get_array_location(array).segment_key)
    assert not gpu_context.driver.locked and not segments._addresses
