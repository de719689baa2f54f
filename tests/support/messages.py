"""Expected errors: type, named arguments, and the text in tests/messages.txt.

After a change of wording, ``python3 run.py messages`` runs the tests and rewrites the file.
"""

import contextlib
import difflib
import fcntl
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from library import DEVICE, HOSTS
from paths import ROOT

from synkhronos.devices.reduce_op import list_collective_ops, list_ops

#: File with the messages of each test file, for both graph libraries.
GOLDEN = ROOT / "tests" / "messages.txt"
INDENT = "    "
#: Parts of a message that differ from run to run, and their replacements.
VOLATILE = {
    rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/]+/[^/]+/[^/\s'\",;:)]+": "TMP",
    re.escape(str(ROOT)): "ROOT",
    r"\bprocess \d+": "process N",
    r"\b0x[0-9a-f]+": "0xN",
    r"this machine has (?:no GPU|cuda0(?: to cuda\d+)?)": "this machine has N GPUs",
    r"\bsynk_function_\d+": "synk_function_N",
    r"memory, [\d,]+ bytes are free": "memory, N bytes are free",
    # Tests add classes to this module.
    r"(mlp_variants\.py has no 'Nobody': it has ).*": r"\1...",
    # Messages of NumPy and h5py differ between versions.
    r"(expected an? (?:\.np[yz]|HDF5) file[^:]*): .*": r"\1: ...",
    # Tracebacks, and notes that the graph library adds to an exception, name lines of source.
    r"(?s)(\nThe traceback of rank \d+:).*": r"\1 ...",
    r"(?s)\n+(Traceback|Apply node that caused|HINT:|Backtrace when).*": "",
}


def normalize(error):
    """Return an exception's type and message in one line, without parts that differ from run to run."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    for pattern, replacement in VOLATILE.items():
        text = re.sub(pattern, replacement, text)
    text = replace_lists_of_ops(text)
    return f"{type(error).__name__}: {text}".replace("\n", "\\n").rstrip()


def replace_lists_of_ops(text):
    """Return a text with a name in capitals for each complete list of ops, so that a new op changes no message."""
    lists = {
        "OPS": list_ops(),
        "COLLECTIVE_OPS": list_collective_ops(),
        "INTEGER_OPS": list_ops(np.dtype(int)),
        "COLLECTIVE_INTEGER_OPS": list_collective_ops(np.dtype(int)),
        "COLLECTIVE_BOOLEAN_OPS": list_collective_ops(np.dtype(bool)),
    }
    for label, ops in lists.items():
        *others, last = map(repr, ops)
        for separator in (", ", " or "):
            text = text.replace(f"{', '.join(others)}{separator}{last}", label)
    return text


def read_golden(path):
    """Return the messages by test file."""
    sections, messages = {}, set()
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith(INDENT):
            messages.add(line.removeprefix(INDENT))
        else:
            messages = sections.setdefault(line, set())
    return sections


def write_golden(path, sections):
    """Write the messages by test file, sorted."""
    lines = []
    for section, messages in sorted(sections.items()):
        lines += [section, *(INDENT + message for message in sorted(messages))] if messages else []
    path.write_text("".join(f"{line}\n" for line in lines))


def check_golden(path, section, message):
    """Fail if a message is not in the file; add it where ``run.py messages`` runs the tests."""
    known = read_golden(path).get(section, set())
    if message in known:
        return
    if os.environ.get("SYNKHRONOS_MESSAGES") == "write":
        with open(ROOT / "run.py") as lock:  # several runs of pytest write
            fcntl.flock(lock, fcntl.LOCK_EX)
            sections = read_golden(path)
            sections.setdefault(section, set()).add(message)
            write_golden(path, sections)
        return
    closest = difflib.get_close_matches(message, known, 1, 0)
    pytest.fail(
        f"{path.name} does not have this message; `python3 run.py messages {section}` writes those of this file anew\n"
        + "\n".join(difflib.ndiff(closest, [message])),
        pytrace=False,
    )


@contextlib.contextmanager
def raises(error, *names):
    """Expect an exception that names arguments, and whose message is in tests/messages.txt.

    Parameters
    ----------
    error : type or tuple of types
    names : str
        Words of the message, such as the wrong argument.  Empty strings are ignored.

    Yields
    ------
    pytest.ExceptionInfo
    """
    with pytest.raises(error) as caught:
        yield caught
    message = normalize(caught.value)
    for name in filter(None, names):
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message), f"{name!r} is not in: {message}"
    # Messages of other devices differ.
    if DEVICE == "host" and not HOSTS:
        check_golden(GOLDEN, str(Path(os.environ["PYTEST_CURRENT_TEST"].split("::")[0])), message)
