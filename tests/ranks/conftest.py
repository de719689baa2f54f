"""Fixtures of sessions without a graph library."""

import pytest

from synkhronos import ranks


@pytest.fixture(params=[1, 2, 3, 5])
def session(request):
    """Fork 1, 2 and more ranks, with the master in the middle."""
    yield ranks.start_session(request.param, request.param // 2, False)
    ranks.close_session()


@pytest.fixture
def session_of_two():
    """Fork two ranks."""
    yield ranks.start_session(2, 0, False)
    ranks.close_session()


@pytest.fixture
def session_of_three():
    """Fork three ranks."""
    yield ranks.start_session(3, 0, False)
    ranks.close_session()
