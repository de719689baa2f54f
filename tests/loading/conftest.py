"""Fixture of loaders that are closed after each test."""

import pytest

from synkhronos.loading import Loader


@pytest.fixture
def load():
    """Give a function that makes loaders; close them after the test."""
    loaders = []

    def make(*args, **kwargs):
        loaders.append(Loader(*args, **kwargs))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
