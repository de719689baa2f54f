"""Fixture of loaders that are closed after each test."""

import pytest
from system import is_alive

from synkhronos.loading import Loader


@pytest.fixture
def load():
    """Yield a function that makes loaders; close them after the test, and check that their processes have ended."""
    loaders = []

    def make(*args, **kwargs):
        loaders.append(Loader(*args, **kwargs))
        return loaders[-1]

    yield make
    pids = [pid for loader in loaders if loader._pool for pid in loader._pool.pids]
    for loader in loaders:
        loader.close()
    assert not any(map(is_alive, pids))
