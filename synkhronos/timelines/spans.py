"""The recorder of a rank's spans, and the registry of the methods that it traces.

All processes of a machine read the same monotonic clock.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from synkhronos.collectives.all_reduce_command import AllReducePlan
from synkhronos.devices import Communicator
from synkhronos.devices.device import HostTransfers
from synkhronos.engines.engine import Engine, Runner
from synkhronos.functions.call import Call
from synkhronos.functions.computation import Computation
from synkhronos.loading.loader import LoaderRows
from synkhronos.ranks import Command, Rank
from synkhronos.ranks.command_runner import CommandRunner
from synkhronos.ranks.control_memory import AWAITS_COMMAND, AWAITS_COMPLETION, ControlMemory
from synkhronos.ranks.mailbox import Mailbox

#: A call of a traced method: name, category, start and end in nanoseconds of the monotonic clock, and the identifier of
#: the thread.  A named tuple would take 0.1 us longer to create.
Span = tuple[str, str, int, int, int]
#: Category of the spans in which a rank waits.
WAIT_CATEGORY = "wait"
#: Name of the spans of a call in the master.
CALL_NAME = "call"
#: Name of the spans of a worker's wait between two commands.
IDLE_NAME = "wait for a command"

#: Function that maps a method's arguments to the name of a span.
SpanNamer = Callable[..., str]


def _name_command(command: Command, rank: Rank) -> str:
    """Return the name of a command's span: the function's name if the command is a call."""
    if isinstance(command, Call):
        computation: Computation = rank.get_object(command.computation_key)
        return f"run {computation.name}"
    return f"run {type(command).__name__}"


def _name_wait(control: ControlMemory, rank: int, is_ready: Any, reason: int, *_: Any) -> str:
    return {AWAITS_COMMAND: IDLE_NAME, AWAITS_COMPLETION: "wait for the ranks"}.get(reason, "wait for a peer")


#: Class, method, category and name of the spans.
_traced_methods: list[tuple[type, str, str, str | SpanNamer]] = []


def register_traced_method(owner: type, method: str, category: str, name: str | SpanNamer) -> None:
    """Register a method of a class, whose calls there and in subclasses that override it become spans.

    Wrappers pass all arguments on.  A `SpanNamer` gets the positional ones: change it with the method's signature.
    """
    if method not in vars(owner):
        raise AttributeError(f"{owner.__qualname__} has no method {method!r} to trace")
    _traced_methods.append((owner, method, category, name))


register_traced_method(CommandRunner, "run_without_releases", "call", CALL_NAME)
register_traced_method(Mailbox, "post", "post", "post")
register_traced_method(ControlMemory, "wait", WAIT_CATEGORY, _name_wait)
register_traced_method(Command, "run", "command", _name_command)
register_traced_method(Computation, "compile_variant", "compile", "compile")
register_traced_method(HostTransfers, "stage_input", "copy", "copy rows")
register_traced_method(Runner, "__call__", "launch", "launch")
register_traced_method(Engine, "fetch_outputs", "copy", "fetch outputs")
register_traced_method(LoaderRows, "wait_for_row_indexes", "load", "wait for the loader")
for collective in sorted(Communicator.__abstractmethods__):
    register_traced_method(Communicator, collective, "exchange", collective)
# Small arrays are reduced without a communicator's method.  Spans of the operation after it are nested.
register_traced_method(AllReducePlan, "reduce_small_and_run", "exchange", "all_reduce")


def _find_overrides(owner: type, method: str) -> Iterator[type]:
    """Yield the classes among ``owner`` and its subclasses that define a method."""
    if method in vars(owner):
        yield owner
    subclasses: list[type] = owner.__subclasses__()
    for subclass in subclasses:
        yield from _find_overrides(subclass, method)


def _call_namer(namer: SpanNamer, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return the name of a call's span; the function's name if the namer fails, as it may for a call that failed."""
    try:
        return namer(*args)
    except Exception:
        return function.__qualname__


def _time_calls(function: Callable[..., Any], category: str, name: str | SpanNamer, spans: deque[Span]) -> Any:
    """Wrap a function so that it records a span at each call."""
    clock, thread = time.monotonic_ns, threading.get_ident

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            end = clock()
            span_name = name if isinstance(name, str) else _call_namer(name, function, args)
            spans.append((span_name, category, start, end, thread()))

    return timed


class SpanRecorder:
    """Records the latest spans of one rank, in the order of their ends."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque()
        self._originals: list[tuple[type, str, Any]] = []

    def install(self, max_spans: int) -> None:
        """Replace the traced methods by wrappers that record spans."""
        self.spans = deque(maxlen=max_spans)
        for owner, method, category, name in _traced_methods:
            for cls in set(_find_overrides(owner, method)):
                original = vars(cls)[method]
                if getattr(original, "__isabstractmethod__", False):
                    continue
                self._originals.append((cls, method, original))
                setattr(cls, method, _time_calls(original, category, name, self.spans))

    def uninstall(self) -> None:
        """Restore the original methods."""
        while self._originals:
            owner, method, original = self._originals.pop()
            setattr(owner, method, original)
