"""Loaders that are closed after each test."""

import pytest

from synkhronos.loading import Loader


@pytest.fixture
def load():
    """Give a loader, and close all of them after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(Loader(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
