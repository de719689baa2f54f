"""Fixture of loaders that are closed after each test."""

import pytest

from synkhronos.loading import Loader


@pytest.fixture
def load():
    """Give a function that makes loaders; close them after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(Loader(*args, **kwargs))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
