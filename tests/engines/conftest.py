"""Fixture of signals in launches."""

import signal

import pytest
from xla_launches import Alarm


@pytest.fixture
def alarm_handler():
    """Raise `Alarm` for each SIGALRM."""

    def handle_alarm(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGALRM, handle_alarm)
    yield
    signal.signal(signal.SIGALRM, before)
