"""Parts of ``import platoon`` in one process: rules, configuration, the queue of mini-batches, order of reports."""

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Pipe
from types import SimpleNamespace

import numpy as np
import pytest
import theano
from platoon import configparser
from platoon.channel import Controller, Worker
from platoon.param_sync import ASGD, EASGD, ParamSyncRule
from platoon.training.global_dynamics import GlobalDynamics
from platoon.util import PlatoonError
from system import run_code, wait_until

from synkhronos.platoon import launcher
from synkhronos.platoon.channel import batch_queue, sockets
from synkhronos.platoon.channel.worker_group import WorkerFailure, WorkerGroup

LIMIT = 30


# -- rules -------------------------------------------------------------------------------------------------------


def make_values(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(2, 3)).astype("float32"), np.float64(rng.normal()), rng.normal(size=4)]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1])
def test_easgd_moves_params_and_master_towards_each_other(alpha):
    params, master = [theano.shared(value) for value in make_values(0)], [np.array(value) for value in make_values(1)]
    local, central = make_values(0), make_values(1)
    rule = EASGD(0.5)
    update = rule.make_update_function(params)
    rule.set_alpha(alpha)
    assert rule.get_alpha() == alpha
    for _ in range(3):
        update(master)
        for i in range(3):
            force = np.asarray(local[i]).dtype.type(alpha) * (local[i] - central[i])
            local[i], central[i] = local[i] - force, central[i] + force
    for param, value, shared, expected in zip(params, local, master, central, strict=True):
        np.testing.assert_array_equal(param.get_value(), value)
        np.testing.assert_array_equal(shared, expected)
        assert param.get_value().dtype == shared.dtype == np.asarray(value).dtype


def test_asgd_sums_the_changes_of_two_workers():
    master = [np.array(value) for value in make_values(0)]
    workers = [[theano.shared(value) for value in make_values(0)] for _ in range(2)]
    updates = [ASGD().make_update_function(params) for params in workers]
    total = [np.array(value, "float64") for value in make_values(0)]
    for step in range(4):
        for k, (params, update) in enumerate(zip(workers, updates, strict=True)):
            for i, param in enumerate(params):
                change = np.asarray((step + 1) * (k + 0.5)).astype(param.dtype)
                param.set_value(param.get_value() + change)
                total[i] += change
            update(master)
            for param, shared in zip(params, master, strict=True):
                np.testing.assert_array_equal(param.get_value(), shared)
    for shared, expected in zip(master, total, strict=True):
        np.testing.assert_allclose(shared, expected, rtol=1e-5)


def test_own_param_sync_rules_update_parameters():
    class Compiled(ParamSyncRule):
        def theano_update(self, local_params):
            master = [param.type() for param in local_params]
            return theano.function(
                master,
                [m + p for m, p in zip(master, local_params, strict=True)],
                updates=[(p, p * 0 + m) for m, p in zip(master, local_params, strict=True)],
                mode="FAST_COMPILE",
            )

    class Summed(ParamSyncRule):
        def update_params(self, local_params, master_params):
            master_params[0] += local_params[0]
            local_params[0].fill(0)

    for rule, local in ((Compiled(), 1), (Summed(), 0)):
        param, master = theano.shared(np.full(3, 2.0)), np.ones(3)
        rule.make_update_function([param])([master])
        np.testing.assert_array_equal(master, np.full(3, 3.0))
        np.testing.assert_array_equal(param.get_value(), np.full(3, local))
    with pytest.raises(NotImplementedError):
        ParamSyncRule().make_update_function([param])([master])


def test_global_dynamics_and_worker_need_the_launcher():
    rule = GlobalDynamics()
    with pytest.raises(NotImplementedError, match="make_rule"):
        rule()
    with pytest.raises(AttributeError, match="Worker instance has not been created yet"):
        rule.worker  # noqa: B018
    with pytest.raises(PlatoonError, match="this process has no controller"):
        Worker(5567)


@pytest.mark.parametrize("name", ["sync_params", "copy_to_local", "copy_to_global"])
def test_exchange_before_init_shared_params_names_the_called_method(name):
    worker = object.__new__(Worker)  # as its constructor leaves it, without a controller
    worker.shared_params = []
    with pytest.raises(PlatoonError, match=rf"{name}: call init_shared_params\(\) first"):
        getattr(worker, name)()


# -- configuration -----------------------------------------------------------------------------------------------


def test_environment_precedes_platoonrc_files(tmp_path, monkeypatch):
    def write(name, host, devices):
        (tmp_path / name).write_text(f"[platoon]\nhosts : {host}\n[devices]\nlisa : {devices}\n")
        return str(tmp_path / name)

    for variable in ("PLATOON_DEVICES", "PLATOON_HOSTS", "PLATOONRC"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    for fetch, argument in ((configparser.fetch_hosts, ()), (configparser.fetch_devices_for_host, ("lisa",))):
        with pytest.raises(KeyError):
            fetch(*argument)
    write(".platoonrc", "h0", "cuda0")
    assert configparser.fetch_devices_for_host("lisa") == ["cuda0"] and configparser.fetch_hosts() == ["h0"]
    write("work/.platoonrc", "h1\n        h2, h3", "cuda1\n       cuda2,cuda3")
    assert configparser.fetch_devices_for_host("lisa") == ["cuda1", "cuda2", "cuda3"]
    assert configparser.fetch_hosts() == ["h1", "h2", "h3"]
    monkeypatch.setenv("PLATOONRC", f"{write('a', 'h4', 'cuda4')}{os.pathsep}{write('b', 'h5', 'cuda5')}")
    assert configparser.fetch_devices_for_host("lisa") == ["cuda5"] and configparser.fetch_hosts() == ["h5"]
    monkeypatch.setenv("PLATOON_DEVICES", "cuda6,cuda7")
    monkeypatch.setenv("PLATOON_HOSTS", "h6")
    assert configparser.fetch_devices_for_host("other") == ["cuda6", "cuda7"] and configparser.fetch_hosts() == ["h6"]
    assert Controller.get_workers_devices([]) == ["cuda6", "cuda7"]
    assert Controller.get_workers_devices(["cpu"]) == ["cpu"]


def test_default_arguments_are_parsed():
    words = ["lstm", "logs", "--single", "-D", "cpu", "cpu", "-w=--rate 3", "--data-port", "7", "--more", "1"]
    parser = Controller.default_parser()
    parser.add_argument("--more")
    assert Controller.default_arguments(parser.parse_args(words)) == {
        "experiment_name": "lstm",
        "log_directory": "logs",
        "devices": ["cpu", "cpu"],
        "worker_args": "--rate 3",
        "control_port": 5567,
        "data_port": 7,
        "data_hwm": 10,
        "multi": False,
    }
    assert Worker.default_arguments(Worker.default_parser().parse_args(["--control-port=6"])) == {
        "control_port": 6,
        "data_port": None,
        "data_hwm": 10,
    }
    with pytest.raises(PlatoonError, match="multi: start an experiment on several hosts with"):
        Controller(multi=True)


def test_launcher_refuses_a_first_host_that_is_not_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x_worker.py").touch()
    monkeypatch.setenv("PLATOON_HOSTS", "lisa0")
    assert launcher.main(["x"]) == launcher.EXIT_WRONG_ARGUMENTS
    assert f"the first has to be this machine, {socket.gethostname()}, got lisa0" in capsys.readouterr().err


def test_launcher_names_the_signal_that_killed_the_controller(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x_worker.py").touch()

    def start_controller(options, logs, devices):
        (logs / "controller_cpu.err").touch()
        return SimpleNamespace(wait=lambda: -40)  # a real-time signal, which has no name

    monkeypatch.setattr(launcher, "_start_controller", start_controller)
    assert launcher.main(["x", "-D", "cpu"]) == launcher.EXIT_EXPERIMENT_ABORTED
    assert "ERROR! the controller was killed by signal 40\n" in capsys.readouterr().err


# -- mini-batches ------------------------------------------------------------------------------------------------


class QueueWithReaders:
    """A sender, and readers in threads."""

    def __init__(self):
        self.is_over = False
        self.address = f"synkhronos-test-{os.getpid()}-{random.random()}"
        self.sender = batch_queue.BatchSender(self.address, 3, lambda: self.is_over)

    def read_batches(self, received, pause=0.0):
        connection = sockets.connect(self.address, lambda: None, LIMIT)
        while True:
            connection.send_bytes(b"")
            batch = batch_queue.receive_arrays(connection.recv_bytes)
            if batch is None:
                return
            received.append(batch)
            time.sleep(pause * random.random())


@pytest.fixture
def queue():
    """Return a queue of the module's messages, closed after the test."""
    queue = QueueWithReaders()
    yield queue
    queue.sender.close()
    queue.is_over = True


def test_queue_gives_each_batch_to_one_reader(queue):
    rng = np.random.default_rng(0)
    dtypes = ["float32", "float64", "int8", "uint16", "bool", "complex64", "S3", "U2", "M8[s]", ">f4"]
    sent = []
    for i in range(60):
        shapes = [tuple(rng.integers(0, 5, rng.integers(0, 4))) for _ in range(rng.integers(0, 4))]
        arrays = [(rng.random(shape) * 100).astype("int64").astype(rng.choice(dtypes)) for shape in shapes]
        sent.append([np.array(i), *arrays])
    received = [[] for _ in range(3)]
    readers = [threading.Thread(target=queue.read_batches, args=(batches, 2e-3)) for batches in received]
    for reader in readers:
        reader.start()
    for batch in sent:
        queue.sender.send(batch)
    queue.sender.close()
    for reader in readers:
        reader.join(LIMIT)
        assert not reader.is_alive()
    batch_by_number = {int(batch[0]): batch for rank_batches in received for batch in rank_batches}
    assert sum(map(len, received)) == len(batch_by_number) == 60
    for i, batch in enumerate(sent):
        assert len(batch_by_number[i]) == len(batch)
        for actual, expected in zip(batch_by_number[i], batch, strict=True):
            np.testing.assert_array_equal(actual, expected)
            assert actual.dtype == expected.dtype and actual.flags.writeable


def test_mini_batch_queue_is_bounded(queue):
    sent, received = [], []

    def send():
        for i in range(8):
            queue.sender.send([np.array(i)])
            sent.append(i)
        queue.sender.close()

    sender = threading.Thread(target=send)
    sender.start()
    wait_until(lambda: len(sent) == 3)
    time.sleep(0.1)
    assert len(sent) == 3
    queue.read_batches(received)
    sender.join(LIMIT)
    assert [int(batch[0]) for batch in received] == list(range(8))
    with pytest.raises(PlatoonError, match="the sender is closed"):
        queue.sender.send([np.zeros(2)])


def test_waiting_sender_ends_with_the_workers(queue):
    for i in range(3):
        queue.sender.send([np.array(i)])
    threading.Timer(0.1, lambda: setattr(queue, "is_over", True)).start()
    with pytest.raises(PlatoonError, match="the workers have ended"):
        queue.sender.send([np.array(3)])


def test_mini_batch_queue_sends_copies(queue):
    array, received = np.ones(3), []
    queue.sender.send([array])
    array[:] = 2
    with pytest.raises(TypeError, match="arrays of numbers or strings"):
        queue.sender.send([np.array([{}])])
    with pytest.raises(TypeError, match="^arrays: expected an array, got a masked one"):
        queue.sender.send([np.ma.masked_array(array, array > 0)])
    queue.sender.close()
    queue.read_batches(received)
    np.testing.assert_array_equal(received[0][0], np.ones(3))


def test_every_worker_gets_the_end_header_while_another_ends(queue):
    headers = []

    def end_worker(_):  # as its thread does between two sends
        queue.sender._connections.remove(ending)
        raise OSError

    ending, other = SimpleNamespace(send_bytes=end_worker), SimpleNamespace(send_bytes=headers.append)
    queue.sender._connections[:] = [ending, other]
    queue.sender._send_end_headers()
    assert headers == [b"null"] and queue.sender._connections == [other]


# -- requests and reports ----------------------------------------------------------------------------------------


class GroupOfPipes:
    """A group whose workers are pipes of this process, and whose master is a process that does nothing."""

    def __init__(self, folder, n):
        self.group = WorkerGroup(
            f"synkhronos-test-{os.getpid()}-{random.random()}", "x", [], ["cpu"] * n, str(folder), None
        )
        self.master = self.group._master_process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
        )
        self.group._master_pidfds.append(os.pidfd_open(self.master.pid))
        self.group._process_ids = list(range(n))
        ends = [Pipe() for _ in range(n)]
        self.group._connections = {theirs: rank for rank, (_, theirs) in enumerate(ends)}
        self.workers = [ours for ours, _ in ends]

    def end(self, status):
        self.master.communicate(b"x" if status == 0 else b"")
        assert (self.master.returncode == 0) == (status == 0)


def test_own_report_of_a_worker_precedes_an_earlier_one_of_its_peer(tmp_path):
    """The report of a peer, which names the worker that it has seen exit, may arrive first."""
    group = GroupOfPipes(tmp_path, 3)
    send_failure(group.workers[0], WorkerFailure(2, "rank 2 has ended", is_self_reported=False))
    threading.Timer(
        0.1, send_failure, (group.workers[1], WorkerFailure(3, "worker 1 exited with status 3", True))
    ).start()
    threading.Timer(0.3, group.end, (1,)).start()
    failure = group.group.serve(lambda *_: "train")
    assert failure == WorkerFailure(3, "worker 1 exited with status 3", True)


def test_own_report_of_a_worker_is_read_after_its_exit(tmp_path):
    group = GroupOfPipes(tmp_path, 2)
    send_failure(group.workers[0], WorkerFailure(2, "rank 1 has ended", is_self_reported=False))
    send_failure(group.workers[1], WorkerFailure(7, "worker 1 exited with status 7", True))
    group.end(1)
    assert group.group.serve(lambda *_: "train").status == 7


def test_each_of_many_requests_is_answered_once_in_order(tmp_path):
    group, n_requests, answered, failed = GroupOfPipes(tmp_path, 4), 60, [], []

    def work(rank, connection):
        try:
            for i in range(n_requests):
                text = "x" * random.choice([0, 10, 100_000])
                connection.send_bytes(encode_json({"req": [rank, i], "worker_id": rank, "req_info": {"text": text}}))
                assert json.loads(connection.recv_bytes()) == [rank, i, len(text)]
                time.sleep(random.random() * 2e-3)
            connection.close()
        except BaseException as error:
            failed.append(error)

    def answer(req, worker_id, info):
        assert req[0] == worker_id
        answered.append(tuple(req))
        return (*req, len(info["text"]))

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(group.workers)]
    for thread in threads:
        thread.start()
    threading.Thread(target=lambda: [thread.join() for thread in threads] and group.end(0)).start()
    assert group.group.serve(answer) is None
    assert not failed and len(answered) == 4 * n_requests
    for rank in range(4):
        assert [i for worker_rank, i in answered if worker_rank == rank] == list(range(n_requests))


def send_failure(connection, failure):
    connection.send_bytes(encode_json({"failure": vars(failure)}))


def encode_json(message):
    return json.dumps(message).encode()


# -- names -------------------------------------------------------------------------------------------------------


def test_platoon_module_is_the_same_under_both_names():
    import platoon.channel.worker

    import synkhronos.platoon.channel.worker as same

    assert platoon.channel.worker is same and platoon.channel.Worker is same.Worker
    assert platoon.__spec__.name == "synkhronos.platoon" and platoon.__spec__.origin == platoon.__file__
    assert importlib.util.find_spec("platoon.nothing") is None
    with pytest.raises(ModuleNotFoundError, match="^platoon.nothing: Synkhronos's version of Platoon has no such"):
        import platoon.nothing  # noqa: F401


def test_installed_platoon_precedes_except_under_the_launcher(tmp_path):
    (tmp_path / "platoon").mkdir()
    (tmp_path / "platoon" / "__init__.py").write_text("name = 'installed'\n")
    (tmp_path / "platoon" / "channel.py").write_text("name = 'channel'\n")
    (tmp_path / "main.py").write_text("from platoon.channel import Worker\nprint(Worker.__module__)\n")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import synkhronos.compat
        import platoon.channel
        print(platoon.name, platoon.channel.name)
    """
    assert run_code(code, str(tmp_path)) == "installed channel\n"
    code = """
        import sys
        from synkhronos.platoon.channel.controller_process import run_user_file
        run_user_file(sys.argv[1] + "/main.py", [])
    """
    assert run_code(code, str(tmp_path)) == "synkhronos.platoon.channel.worker\n"
