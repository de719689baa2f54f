"""Reductions of the fake of NCCL: all ranks send their arrays to a server on rank 0.

The server works in rounds: it takes one message of each rank, and then answers all.
"""

import contextlib
import fcntl
import os
import pickle
import socket
import struct
import threading
import time

import numpy as np

DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
with contextlib.suppress(ImportError):  # JAX brings it; Theano has no such numbers
    import ml_dtypes

    DTYPES.append(ml_dtypes.bfloat16)
#: sum, prod, max, min, avg
OPS = [np.add, np.multiply, np.maximum, np.minimum, np.add]
_SIOCGIFADDR = 0x8915
_HEAD = struct.Struct("=Q")
#: Seconds for which a rank tries to reach the server.
_TRIES = 2.0
_busy = [0]


def is_busy():
    """Whether an operation is pending, or waits for a peer that never starts it."""
    return _busy[0] > 0


def write_log(text):
    """Write into the log, where there is one, as NCCL does."""
    if os.environ.get("NCCL_DEBUG") == "INFO" and "NCCL_DEBUG_FILE" in os.environ:
        with open(os.environ["NCCL_DEBUG_FILE"], "a") as file:
            file.write(f"{socket.gethostname()}:{os.getpid()}:{threading.get_native_id()} [0] {text}\n")


def find_interface():
    """Return the name and the address: of NCCL_SOCKET_IFNAME, or else of the first that is not the loopback."""
    names = [name for _, name in socket.if_nameindex()]
    prefix = os.environ.get("NCCL_SOCKET_IFNAME")
    order = [prefix] if prefix else [*(name for name in names if name != "lo"), "lo"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for name in order:
            try:
                reply = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            address = socket.inet_ntoa(reply[20:24])
            write_log(f"NCCL INFO Bootstrap: Using {name}:{address}<0>")
            return address
    write_log("NCCL WARN Bootstrap : no socket interface found")
    raise RuntimeError("ncclInternalError")


def _send(connection, value):
    content = pickle.dumps(value)
    connection.sendall(_HEAD.pack(len(content)) + content)


def _receive(connection):
    def receive_exactly(n):
        content = bytearray(n)
        buffer = memoryview(content)
        while buffer:
            n_received = connection.recv_into(buffer)
            if not n_received:
                raise ConnectionError
            buffer = buffer[n_received:]
        return content

    return pickle.loads(receive_exactly(_HEAD.unpack(receive_exactly(_HEAD.size))[0]))


class Server(threading.Thread):
    """Started with the unique id, by rank 0; serves as long as all ranks send."""

    def __init__(self):
        super().__init__(daemon=True)
        self.address = find_interface()
        self._listener = socket.create_server(("", 0))
        self.port = self._listener.getsockname()[1]
        self.start()

    def run(self):
        ranks, size = {}, 1
        try:
            while len(ranks) < size:
                connection, _ = self._listener.accept()
                size, rank = _receive(connection)
                ranks[rank] = connection
            self._listener.close()
            while True:
                if self._serve([ranks[r] for r in range(size)]):
                    return
        except (ConnectionError, EOFError):
            # A reference keeps the sockets open: waiting ranks go on waiting, as with NCCL.
            self._open_connections = ranks

    def _serve(self, connections):
        if not hasattr(self, "_begun"):
            self._begun = True
            answers = [None] * len(connections)
        else:
            requests = [_receive(connection) for connection in connections]
            assert len({kind for kind, *_ in requests}) == 1, "the ranks call NCCL in different orders"
            answers = _compute_answers(*requests[0][:2], [content for *_, content in requests])
        for connection, answer in zip(connections, answers, strict=True):
            _send(connection, answer)


def _compute_answers(kind, parameters, contents):
    """Return the answer to each rank."""
    if kind == "broadcast":  # the root waits for nobody, and its unread data may exceed its socket's buffer
        return [None if r == parameters else contents[parameters] for r in range(len(contents))]
    if kind == "group":
        return [
            [(source, content) for source, sent in enumerate(contents) for target, content in sent if target == r]
            for r in range(len(contents))
        ]
    dtype, op, root = parameters
    arrays = [np.frombuffer(content, DTYPES[dtype]) for content in contents]
    wide = np.float32 if op == 4 and arrays[0].dtype.itemsize == 2 else arrays[0].dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = OPS[op](total, array.astype(wide))
    if op == 4:
        total = total / len(arrays)
    result = total.astype(arrays[0].dtype).tobytes()
    return [result if root in (None, r) else None for r in range(len(contents))]


class Link:
    """One rank's connection to the server."""

    def __init__(self, size, rank, address, port):
        self.size, self.rank, self.is_aborted = size, rank, False
        #: Number of answers for which this rank has not waited.
        self._unread = 0
        if rank:
            find_interface()
        deadline = time.monotonic() + _TRIES
        while True:
            try:
                self._socket = socket.create_connection((address, port), 1.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    write_log(f"NCCL WARN socketStartConnect: Connect to {address}<{port}> failed : {error.strerror}")
                    raise RuntimeError("ncclSystemError") from None
                time.sleep(0.05)
        self._socket.settimeout(None)
        _send(self._socket, (size, rank))
        _receive(self._socket)

    def exchange(self, kind, parameters, content, receives=True):
        """Send this rank's data; return the received data, or nothing if the communicator was aborted.

        A rank that only sends does not wait for the others, since NCCL buffers small messages.
        """
        _busy[0] += 1
        try:
            _send(self._socket, (kind, parameters, content))
            if not receives:
                self._unread += 1
                return None
            while self._unread:
                _receive(self._socket)
                self._unread -= 1
            return _receive(self._socket)
        except (ConnectionError, OSError, EOFError):
            while not self.is_aborted:  # a peer has gone
                time.sleep(0.01)
            return None
        finally:
            _busy[0] -= 1

    def abort(self):
        """Wake the waiting rank."""
        self.is_aborted = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
