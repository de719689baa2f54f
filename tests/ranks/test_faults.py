"""Failures and deaths of ranks: the error that the master raises, its delay, and leaks.

Each test starts a program that reports when it reaches a given point; the test then kills, stops or interrupts one of
its processes.
"""

import os
import signal
import time

import pytest
from faults.harness import Program, check_delay, check_footprint
from system import wait_for_state

pytestmark = [pytest.mark.starts_programs, pytest.mark.faults]

ELSEWHERE = ["distribute", "build", "arguments"]
PLACES = ["idle", "call", "compiled", "collective", "distribute"]
UNSTREAMED = ["scatter", "set_value", "get_lengths", "get_shapes"]
STREAMED = ["broadcast", "gather", "all_gather", "reduce", "all_reduce", "reduce_scatter", "get_value"]


def start_held_program(place, fault_ranks):
    """Start a program in which the ranks `fault_ranks` block at `place`, and the others wait for them."""
    where, how = ("call", "compiled") if place == "compiled" else (place, "python")
    return Program("run_planned_action", where=where, action=f"hold:{how}", fault_ranks=fault_ranks)


def wait_until_inside(program, place, n):
    """Wait until `n` ranks have reached the point of the fault; return the process ids by rank."""
    pids = {int(r): pid for r, pid in program.wait_for_event("ready")["pids"].items()}
    if place != "idle":
        for _ in range(n):
            program.wait_for_event("inside")
    return pids


def check_next_calls(program, survived):
    """Check what the program reports after a fault, and its next calls."""
    event = program.wait_for_event("alive" if survived else "dead")
    if not survived:
        check_footprint(event)
    program.check_calls_and_exit()
    return event


def check_error(outcome, fault_time, error="WorkerError", words=(), worker=None):
    """Check the outcome of a fault and its delay."""
    assert outcome.get("error") == error, outcome
    for word in words:
        assert word in outcome["message"], outcome["message"]
    if worker is not None:
        assert outcome["worker"] == worker
    check_delay(outcome["ended"] - fault_time)


# -- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    [*(("SIGKILL", place) for place in PLACES if place != "idle"), ("SIGSEGV", "compiled"), ("SIGTERM", "idle")],
)
def test_worker_killed_by_a_signal_is_named(name, place):
    with start_held_program(place, [2]) as program:
        pids = wait_until_inside(program, place, 1)
        fault_time = program.send_signal(pids[2], signal.Signals[name])
        if place == "idle":
            program.release()
        outcome = program.wait_for_event("outcome")
        check_error(outcome, fault_time, words=["rank 2", str(pids[2]), name, "synkhronos.fork()"], worker=2)
        check_next_calls(program, survived=False)


@pytest.mark.parametrize(
    ("target", "place"),
    [("worker", "compiled"), ("worker", "distribute"), *((kind, "collective") for kind in ("worker", "master", "all"))],
)
def test_stopped_processes_continue_after_sigcont(place, target):
    fault_ranks = {"worker": [2], "master": [0], "all": [0, 1, 2]}[target]
    with start_held_program(place, fault_ranks) as program:
        pids = wait_until_inside(program, place, len(fault_ranks))
        stopped = [program.pid] if target == "master" else [pids[2]] if target == "worker" else list(pids.values())
        program.send_signal(None if target == "all" else stopped[0], signal.SIGSTOP)
        for pid in stopped:
            wait_for_state(pid, "T")
        program.release()
        assert program.is_silent(0.1)
        program.send_signal(None if target == "all" else stopped[0], signal.SIGCONT)
        outcome = program.wait_for_event("outcome")
        assert "error" not in outcome, outcome
        check_next_calls(program, survived=True)


@pytest.mark.parametrize("place", ["idle", "compiled", "collective"])
def test_worker_ignores_sigint(place):
    with start_held_program(place, [2]) as program:
        pids = wait_until_inside(program, place, 1)
        program.send_signal(pids[2], signal.SIGINT)
        program.release()
        assert "error" not in program.wait_for_event("outcome")
        check_next_calls(program, survived=True)


@pytest.mark.parametrize(
    ("name", "place", "target"),
    [
        *(("SIGKILL", place, "master") for place in PLACES),
        ("SIGTERM", "compiled", "master"),
        ("SIGKILL", "idle", "all"),
    ],
)
def test_master_death_ends_all_processes(name, place, target):
    fault_ranks = [1, 2] if place == "distribute" else [0, 1, 2] if target == "all" else [0]
    if place == "compiled":
        fault_ranks = [0, 1, 2]  # workers in compiled code run no Python code that could notice the death
    with start_held_program(place, fault_ranks) as program:
        wait_until_inside(program, place, len(fault_ranks))
        program.send_signal(program.pid if target == "master" else None, signal.Signals[name])
        program.check_no_leaks()
        assert program.wait_for_exit() == -signal.Signals[name]


@pytest.mark.parametrize(("place", "how"), [("call", "sleep"), ("build", "python"), ("collective", "python")])
def test_busy_master_notices_a_workers_death(place, how):
    action = f"hold:{how}"  # an all_reduce defers the signal
    with Program("run_planned_action", where=place, action=action, fault_ranks=[0], name="broadcast") as program:
        pids = wait_until_inside(program, place, 1)
        fault_time = program.send_signal(pids[2], signal.SIGKILL)
        outcome = program.wait_for_event("outcome")  # the fault's point is not released
        check_error(outcome, fault_time, words=["rank 2", str(pids[2]), "SIGKILL"], worker=2)
        check_next_calls(program, survived=False)


def test_death_is_noticed_with_a_replaced_sigchld_handler():
    with Program("run_planned_action", where="call", action="hold:python", fault_ranks=[0, 2], urgent=True) as program:
        pids = wait_until_inside(program, "call", 2)
        program.send_signal(pids[2], signal.SIGKILL)
        assert program.is_silent(0.2)
        program.release()
        check_error(program.wait_for_event("outcome"), time.monotonic(), words=["rank 2", "SIGKILL"], worker=2)
        check_next_calls(program, survived=False)


@pytest.mark.parametrize("reaper", ["system", "master"])
def test_death_is_reported_if_its_exit_status_was_reaped(reaper):
    with Program("run_planned_action", where="call", action="hold:python", fault_ranks=[2], reaper=reaper) as program:
        pids = wait_until_inside(program, "call", 1)
        fault_time = program.send_signal(pids[2], signal.SIGKILL)
        outcome = program.wait_for_event("outcome")
        check_error(outcome, fault_time, words=["rank 2", str(pids[2]), "ended with an unknown exit status"], worker=2)
        check_next_calls(program, survived=False)


@pytest.mark.parametrize("place", ["idle", "call"])
def test_stopped_worker_ends_with_the_master(place):
    with start_held_program(place, [2]) as program:
        pids = wait_until_inside(program, place, 1)
        program.send_signal(pids[2], signal.SIGSTOP)
        wait_for_state(pids[2], "T")
        program.send_signal(program.pid, signal.SIGKILL)
        program.check_no_leaks()


# -- while forking -------------------------------------------------------------------------------------------


def test_worker_that_dies_during_fork_is_named():
    with Program("fork_with_fault", how="worker") as program:
        pid = program.wait_for_event("inside")["pids"]["2"]
        fault_time = program.send_signal(pid, signal.SIGKILL)
        check_error(program.wait_for_event("outcome"), fault_time, words=["rank 2", str(pid), "SIGKILL"], worker=2)
        check_next_calls(program, survived=False)


def test_worker_stopped_during_fork_is_waited_for():
    with Program("fork_with_fault", how="worker") as program:
        pid = program.wait_for_event("inside")["pids"]["2"]
        program.send_signal(pid, signal.SIGSTOP)
        wait_for_state(pid, "T")
        program.release()
        assert program.is_silent(0.1)
        program.send_signal(pid, signal.SIGCONT)
        assert program.wait_for_event("outcome")["value"] == 4
        check_footprint(program.wait_for_event("closed"))
        assert program.wait_for_exit() == 0


@pytest.mark.parametrize(
    ("name", "target", "spawn"),
    [("SIGKILL", "master", False), ("SIGTERM", "all", False), ("SIGKILL", "master", True)],
)
def test_master_death_during_fork_ends_all_processes(name, target, spawn):
    with Program("fork_with_fault", how="master", spawn=spawn) as program:
        program.wait_for_event("inside")
        program.send_signal(program.pid if target == "master" else None, signal.Signals[name])
        program.check_no_leaks()


def test_worker_ends_if_the_master_died_before_it_started():
    with Program("fork_with_fault", how="child") as program:
        program.wait_for_event("inside")
        program.send_signal(program.pid, signal.SIGKILL)
        program.process.wait()
        program.release()
        program.check_no_leaks()


@pytest.mark.parametrize(("how", "spawn"), [("raise", False), ("limit", False), ("raise", True)])
def test_fork_that_fails_half_way_leaves_nothing(how, spawn):
    if how == "limit" and os.geteuid() != 0:
        pytest.skip("needs a user who has no other processes")
    # OpenBLAS raises SIGINT when it can't start a thread.
    with Program("fork_with_fault", "env", "OPENBLAS_NUM_THREADS=1", how=how, spawn=spawn) as program:
        outcome = program.wait_for_event("outcome")
        assert outcome["error"] == "BlockingIOError", outcome
        check_next_calls(program, survived=False)


# -- faults that ranks cause themselves ----------------------------------------------------------------------


def run(where, action, fault_ranks=(2,), **kwargs):
    """Start a program in which ranks cause the fault themselves."""
    return Program("run_planned_action", where=where, action=action, fault_ranks=list(fault_ranks), **kwargs)


@pytest.mark.parametrize(("code", "place"), [(0, "call"), (7, "build")])
def test_worker_that_exits_is_named_with_its_status(place, code):
    with run(place, f"_exit:{code}") as program:
        outcome = program.wait_for_event("outcome")
        check_error(outcome, program.get_fault_time(), words=["rank 2", f"exited with code {code}"], worker=2)
        check_next_calls(program, survived=False)


@pytest.mark.parametrize(
    ("action", "kind", "place"),
    [
        *(("raise:ValueError", "ValueError", place) for place in ["call", "slice", "collective", *ELSEWHERE]),
        ("raise-silent", "UnprintableError", "collective"),
        ("raise-long", "ValueError", "call"),
    ],
)
def test_exception_in_a_worker_leaves_ranks_usable(place, action, kind):
    with run(place, action) as program:
        outcome = program.wait_for_event("outcome")
        check_error(outcome, program.get_fault_time(), words=["rank 2", kind], worker=2)
        assert list(outcome["failures"]) == ["2"]
        assert outcome["traceback"].startswith("Traceback")
        assert kind in outcome["failures"]["2"]
        check_next_calls(program, survived=True)


@pytest.mark.parametrize(
    ("place", "fault_ranks"),
    [*((place, [0]) for place in ("call", "slice", "collective", "build")), ("call", [0, 1, 2]), ("build", [0, 1, 2])],
)
def test_exception_of_the_master_is_raised_unchanged(place, fault_ranks):
    with run(place, "raise:ValueError", fault_ranks=fault_ranks) as program:
        outcome = program.wait_for_event("outcome")
        if place == "call" or fault_ranks == [0]:
            check_error(outcome, program.get_fault_time(), "ValueError", words=["on 0"])
        else:  # it may be cancelled by a worker's failure first
            check_error(outcome, program.get_fault_time(), outcome["error"], words=[" on "])
            assert outcome["error"] in ("ValueError", "WorkerError")
        if place == "call" and len(fault_ranks) > 1:  # there is no barrier before it
            assert [note.split(":")[0] for note in outcome["notes"] if note.startswith("rank")] == ["rank 1", "rank 2"]
        check_next_calls(program, survived=True)


@pytest.mark.parametrize(("fault_ranks", "skip"), [([2], 0), ([0], 0), ([0, 1, 2], 0), ([1], 1)])
def test_error_lists_ranks_with_applied_updates(fault_ranks, skip):
    with run("slice" if skip else "call", "raise:ValueError", fault_ranks=fault_ranks, skip=skip) as program:
        outcome = program.wait_for_event("outcome")
        alive = check_next_calls(program, survived=True)
        text = outcome["effect"] or next(note for note in outcome["notes"] if "updates were applied" in note)
        applied = [r for r in range(3) if r not in fault_ranks]
        assert ("on no rank" if not applied else f"on ranks {applied}, and not on ranks {fault_ranks}") in text
        # Earlier calls have applied updates: one call, and with slices another one of two slices.
        start, end = (4.0, 10.0) if skip else (1.0, 2.0)
        assert alive["w"] == [end if r in applied else start for r in range(3)]


@pytest.mark.parametrize(
    "fault", [{"action": "raise:MemoryError", "point": "object"}, {"action": "raise:OSError", "skip": 1}]
)
@pytest.mark.parametrize(
    ("name", "fault_rank"), [*((name, 1) for name in STREAMED), ("broadcast", 0), ("all_reduce", 0)]
)
def test_collective_raises_failures_of_a_rank(name, fault_rank, fault):
    """An array can't be allocated, or the second chunk can't be sent."""
    with run("collective", fault_ranks=[fault_rank], name=name, **fault) as program:
        outcome = program.wait_for_event("outcome")
        error, worker = ("WorkerError", 1) if fault_rank else (fault["action"].partition(":")[2], None)
        check_error(outcome, program.get_fault_time(), error, worker=worker)
        check_next_calls(program, survived=True)


@pytest.mark.parametrize("name", UNSTREAMED)
def test_collective_of_one_chunk_raises_memory_errors(name):
    with run("collective", "raise:MemoryError", fault_ranks=[1], name=name, point="object") as program:
        check_error(program.wait_for_event("outcome"), program.get_fault_time(), worker=1)
        check_next_calls(program, survived=True)


@pytest.mark.parametrize("name", ["broadcast", "gather", "all_reduce"])
def test_collective_reports_deaths_between_chunks(name):
    with run("collective", "kill:SIGKILL", fault_ranks=[1], name=name, skip=1) as program:
        outcome = program.wait_for_event("outcome")
        check_error(outcome, program.get_fault_time(), words=["rank 1", "SIGKILL"], worker=1)
        check_next_calls(program, survived=False)


# -- missing resources of the machine ------------------------------------------------------------------------


def test_lack_of_shared_memory_raises_memory_error():
    with Program("limit_shared_memory") as program:
        for event in ("data", "grow"):
            outcome = program.wait_for_event(event)
            assert outcome.get("error") == "MemoryError", outcome
            assert "ulimit -f" in outcome["message"]
        assert program.wait_for_event("kept")["right"]
        for event in ("call", "collective"):
            outcome = program.wait_for_event(event)
            assert outcome.get("error") == "MemoryError", outcome
            assert "ulimit -f" in outcome["message"]
        assert program.wait_for_event("fork").get("value") == 3  # anonymous memory is not limited
        program.check_calls_and_exit()


@pytest.mark.parametrize("spare", [0, 3])
def test_fork_names_the_limit_of_open_files(spare):
    with Program("exhaust_file_descriptors", where="fork", spare=spare) as program:
        outcome = program.wait_for_event("outcome")
        assert outcome["error"] == "OSError" and "open files" in outcome["message"], outcome
        check_next_calls(program, survived=False)


def test_data_need_few_open_files():
    with Program("exhaust_file_descriptors", where="master", spare=8) as program:
        assert program.wait_for_event("outcome").get("value") is True, program.events
        program.check_calls_and_exit()


def test_worker_at_the_limit_of_open_files_continues():
    with Program("exhaust_file_descriptors", where="worker", spare=0) as program:
        assert program.wait_for_event("outcome").get("value") == 15.0, (
            program.events
        )  # the worker keeps a spare descriptor
        program.check_calls_and_exit()


def test_worker_at_the_limit_of_address_space_continues():
    with Program("create_unmappable_segment") as program:
        outcome = program.wait_for_event("outcome")
        assert outcome["error"] == "WorkerError" and "can't be mapped" in outcome["message"], outcome
        assert program.wait_for_event("again").get("value") == 15.0, program.events  # the segment is mapped now
        program.check_calls_and_exit()


# -- odd circumstances ---------------------------------------------------------------------------------------


def test_ranks_outlive_the_thread_that_forked_them():
    with Program("fork_in_thread") as program:
        assert program.wait_for_event("fork")["value"] == 3
        assert program.wait_for_event("outcome").get("value") == 15.0, program.events
        program.check_calls_and_exit()


def test_ranks_forked_in_a_thread_do_not_outlive_the_master():
    with Program("fork_in_thread", busy=True) as program:
        program.wait_for_event("inside")
        program.wait_for_event("inside")
        program.send_signal(program.pid, signal.SIGKILL)
        program.check_no_leaks()


def test_failure_in_the_first_command_is_reported():
    with Program("fail_in_first_command") as program:
        outcome = program.wait_for_event("outcome")
        check_error(outcome, program.get_fault_time(), words=["ValueError"], worker=1)
        program.check_calls_and_exit()


def test_ranks_need_no_standard_streams():
    with Program("call_without_standard_files", "sh", "-c", '"$@" <&- >&- 2>&-', "sh") as program:
        program.check_calls_and_exit()


def test_broken_stdout_leaves_ranks_usable():
    read, write = os.pipe()
    with Program("print_without_reader", pass_on={"stdout": write}) as program:
        os.close(write)
        program.wait_for_event("ready")
        os.close(read)
        program.release()
        assert "error" not in program.wait_for_event("buffered")
        outcome = program.wait_for_event("outcome")
        assert outcome["error"] == "WorkerError" and "BrokenPipeError" in outcome["message"], outcome
        check_next_calls(program, survived=True)


def test_close_ends_stopped_workers():
    with start_held_program("idle", []) as program:
        pids = wait_until_inside(program, "idle", 0)
        for r in (1, 2):
            program.send_signal(pids[r], signal.SIGSTOP)
            wait_for_state(pids[r], "T")
        program.send_signal(program.pid, signal.SIGINT)  # the program ends and closes the ranks
        program.check_no_leaks()  # workers get two seconds to exit
        assert program.wait_for_exit() == -signal.SIGINT
