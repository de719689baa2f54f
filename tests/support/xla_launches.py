"""Helpers of the tests of launches by XLA."""

import pytest
from library import DEVICE

from synkhronos.functions.computation import DEFAULT_VARIANT

not_on_gpus = pytest.mark.skipif(DEVICE == "gpu", reason="fakes other ranks in host memory")


class Alarm(BaseException):
    """Raised by a signal handler."""


def get_runner(function):
    """Return the engine's runner of a function."""
    return function._computation.get_or_compile(DEFAULT_VARIANT).runner
