"""Dictionaries whose keys are held weakly, and compared by identity."""

import gc

from synkhronos.containers import WeakKeyDict


class Owner:
    """An object with the hash value of every other."""

    def __hash__(self):
        return 1


def test_weak_keys_forget_collected_objects():
    keys = WeakKeyDict()
    first, second = Owner(), Owner()
    keys[first], keys[second] = 1, 2
    keys[second] = 3
    assert (keys.get(first), keys.get(second), keys.get(Owner())) == (1, 3, None)
    assert first in keys and Owner() not in keys
    assert set(keys) == {first, second}
    del first
    assert list(keys) == [second]
    keys.discard(second)
    keys.discard(second)
    assert list(keys) == []
    keys[second] = 4
    del keys  # before its keys are collected
    gc.collect()
    del second
