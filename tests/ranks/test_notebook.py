"""A Jupyter kernel forks, computes, is interrupted, computes again, is restarted, and leaves no process."""

import os
import queue
import textwrap

import pytest
from paths import ROOT, SUPPORT
from system import LIMIT_SECONDS, list_children, wait_until_ended

pytestmark = [pytest.mark.starts_programs, pytest.mark.faults]

pytest.importorskip("ipykernel")
jupyter_client = pytest.importorskip("jupyter_client")

SETUP = f"""
    import ctypes, os, sys, time
    sys.path[:0] = {[str(SUPPORT), str(ROOT)]!r}
    import numpy as np
    from library import shared, tensor
    import synkhronos as synk
    from synkhronos import ranks

    # What a command is made of has to be there when the workers are forked.
    class Long(ranks.Command):
        def __init__(self, busy):
            self.busy = busy
        def run(self, rank):
            if rank.is_master:
                print("inside", flush=True)
                while self.busy == "master":
                    time.sleep(0.01)
            elif rank.number == 1 and self.busy == "worker":
                # Python does not run meanwhile, as in compiled code.
                ctypes.PyDLL(None).read(released, ctypes.create_string_buffer(1), 1)
            rank.barrier()

    class Fails(ranks.Command):
        def run(self, rank):
            if rank.number == 2:
                raise LookupError("not here")
            rank.barrier()

    released, release = os.pipe()
    n = synk.fork(3, use_gpu=False)
    pids = list(ranks.get_session().worker_pids.values())
    x = tensor.dvector("x")
    w = shared(np.zeros(2), "w")
    f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + 1)])
    print("workers", *pids)
"""


def parse_pids(printed):
    """Return the process IDs in the last line of the first cell; other libraries' warnings may precede it."""
    assert "workers" in printed, printed
    return [int(pid) for pid in printed.split("workers")[1].split()]


class Notebook:
    """A kernel, and the output of its cells."""

    def __init__(self):
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        # Theano's compilers would wait for each other, and print that into the output of cells.
        flags = "mode=Mode,linker=py,optimizer=None"
        libraries = {"PYTENSOR_FLAGS": flags, "THEANO_FLAGS": f"blas.ldflags=,{flags}"}
        self.manager.start_kernel(env={**os.environ, **libraries, "IPYTHONDIR": "/nonexistent"})
        self.connect()

    def connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_SECONDS)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def start(self, code):
        """Start a cell, and return once it runs."""
        cell = self.client.execute(textwrap.dedent(code))
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT_SECONDS)
            if message["parent_header"].get("msg_id") == cell and message["msg_type"] == "execute_input":
                return cell

    def wait_until_printed(self, cell, text):
        """Wait until a cell has printed a text."""
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT_SECONDS)
            if message["parent_header"].get("msg_id") == cell and text in message["content"].get("text", ""):
                return

    def finish(self, cell):
        """Wait until a cell ends; return its further output, and the name of its error."""
        text, error = "", None
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=LIMIT_SECONDS)
            except queue.Empty:
                raise AssertionError(f"silent after {text!r}") from None
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] == "error":
                error = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return text.strip(), error

    def run(self, code):
        return self.finish(self.start(code))


@pytest.fixture
def notebook():
    """Start the kernel of a notebook; check after the test that it leaves no shared memory."""
    notebook = Notebook()
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)


def test_notebook_runs_on_after_interrupt_and_restart(notebook):
    printed, error = notebook.run(SETUP)
    assert error is None
    pids = parse_pids(printed)
    assert sorted(pids) == sorted(list_children(notebook.pid))
    assert notebook.run("print(float(f(np.arange(6.0))))") == ("15.0", None)

    for calls, busy in enumerate(["master", "worker"], 2):
        cell = notebook.start(f"""
            try:
                ranks.get_session().run(Long({busy!r}))
            finally:
                if {busy!r} == "worker":  # until now
                    os.write(release, b"x")
        """)
        notebook.wait_until_printed(cell, "inside")
        notebook.manager.interrupt_kernel()
        assert notebook.finish(cell) == ("", "KeyboardInterrupt")
        assert notebook.run("print(float(f(np.arange(6.0))), synk.gather(w).tolist())") == (
            f"15.0 {[[float(calls)] * 2] * 3}",
            None,
        )

    # Users run the first cell again.
    assert notebook.run("synk.close()") == ("", None)
    wait_until_ended(pids)
    printed, error = notebook.run(SETUP)
    assert error is None
    assert notebook.run("print(float(f(np.arange(6.0))))") == ("15.0", None)

    notebook.manager.restart_kernel()
    wait_until_ended(parse_pids(printed))
    notebook.client.stop_channels()
    notebook.connect()
    assert notebook.run(SETUP)[1] is None
    assert notebook.run("print(float(f(np.arange(6.0))))") == ("15.0", None)


def test_killed_kernel_leaves_no_worker(notebook):
    printed, error = notebook.run(SETUP)
    assert error is None
    os.kill(notebook.pid, 9)
    wait_until_ended(parse_pids(printed))


def test_worker_error_is_shown_with_its_traceback(notebook):
    assert notebook.run(SETUP)[1] is None
    printed, error = notebook.run("""
        try:
            ranks.get_session().run(Fails())
        except synk.WorkerError as error:
            print(error.rank, error.worker_traceback.splitlines()[-1])
            raise
    """)
    assert (printed, error) == ("2 LookupError: not here", "WorkerError")
    assert notebook.run("print(float(f(np.arange(6.0))))") == ("15.0", None)
