"""A user-defined command: the recipe of docs/extending.rst."""

import os

import pytest
from library import DEVICE

from synkhronos import ranks
from synkhronos.ranks import Command

pytestmark = [
    pytest.mark.new_ranks,  # workers that have imported the command
    pytest.mark.skipif(DEVICE != "host", reason="the command does not depend on the device"),
]


# command begins
class GetProcessIds(Command):
    """Return the process ID of every rank."""

    def run(self, rank):
        return rank.all_gather(os.getpid())


def get_process_ids():
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        return session.run(GetProcessIds())


# command ends


@pytest.mark.parametrize("n", [1, 3])
def test_own_command_runs_on_all_ranks(fork, n):
    fork(n)
    workers = ranks.get_session().worker_pids
    assert get_process_ids() == [workers.get(r, os.getpid()) for r in range(n)]
