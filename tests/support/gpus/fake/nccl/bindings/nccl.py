"""Stands for NCCL's functions, as nccl4py has them."""

import ctypes
import functools
import threading

import numpy as np

from nccl import wire

_links = []
#: Seconds after which an operation that is not in place is left to a thread.
_MAX_CALL_SECONDS = 0.5
#: Operations of the open group: arrays to send, and targets of received arrays; None if no group is open.
_group = None


def get_handle(link):
    _links.append(link)
    return len(_links)


def _nbytes(count, dtype):
    return count * np.dtype(wire.DTYPES[dtype]).itemsize


def _collective(kind, parameters, source, target, count, dtype, handle, receivers=None):
    """Call a collective; ``receivers`` are the ranks that receive a result, None for all of them."""
    nbytes, link = _nbytes(count, dtype), _links[handle - 1]
    content = ctypes.string_at(source, nbytes)
    result = link.exchange(kind, parameters, content, receivers is None or link.rank in receivers)
    if result is not None:
        ctypes.memmove(target, result, nbytes)


def all_reduce(source, target, count, dtype, op, handle, stream):
    arguments = "reduce", (dtype, op, None), source, target, count, dtype, handle
    if source == target or stream is None:
        _collective(*arguments)
        return
    # The library may start it before it knows whether the peers do, and then aborts it from this thread.
    thread = threading.Thread(target=_collective, args=arguments, daemon=True)
    thread.start()
    thread.join(_MAX_CALL_SECONDS)


def reduce(source, target, count, dtype, op, root, handle, stream):
    _collective("reduce", (dtype, op, root), source, target, count, dtype, handle, [root])


def reduce_scatter(source, target, count, dtype, op, handle, stream):
    for root in range(_links[handle - 1].size):
        reduce(source + root * _nbytes(count, dtype), target, count, dtype, op, root, handle, stream)


def all_gather(source, target, count, dtype, handle, stream):
    for root in range(_links[handle - 1].size):
        broadcast(source, target + root * _nbytes(count, dtype), count, dtype, root, handle, stream)


def broadcast(source, target, count, dtype, root, handle, stream):
    others = set(range(_links[handle - 1].size)) - {root}
    _collective("broadcast", root, source, target, count, dtype, handle, others)
    if _links[handle - 1].rank == root:
        ctypes.memmove(target, source, _nbytes(count, dtype))


def group_start():
    global _group
    _group = {"handle": None, "send": [], "recv": {}}


def _run_in_group(call):
    """Wrap a call outside of a group in a group of its own, as NCCL does."""

    @functools.wraps(call)
    def called(*arguments):
        if _group is not None:
            return call(*arguments)
        group_start()
        call(*arguments)
        group_end()

    return called


@_run_in_group
def send(source, count, dtype, peer, handle, stream):
    _group["handle"] = handle
    _group["send"].append((peer, ctypes.string_at(source, _nbytes(count, dtype))))


@_run_in_group
def recv(target, count, dtype, peer, handle, stream):
    _group["handle"] = handle
    _group["recv"][peer] = target, _nbytes(count, dtype)


def group_end():
    """Run the operations of the group; each rank has one group at a time, which may be empty."""
    global _group
    group, _group = _group, None
    handle = group["handle"] or len(_links)
    for peer, content in _links[handle - 1].exchange("group", None, group["send"]) or []:
        target, nbytes = group["recv"][peer]
        assert nbytes == len(content)
        ctypes.memmove(target, content, nbytes)


def comm_get_async_error(handle):
    return 0
