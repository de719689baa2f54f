"""Dictionaries with weak keys that are compared by identity, and caches of bounded length."""

import gc

from synkhronos.containers import BoundedCache, WeakKeyDict


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


def test_bounded_cache_is_emptied_when_it_is_full():
    cache = BoundedCache(3)
    contents = []
    for i in range(7):
        cache[i] = -i
        contents.append(list(cache))
    assert contents == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6]]
    assert cache.get(6) == -6 and cache.get(5) is None
    cache[7], cache[8], cache[6] = 7, 8, 6  # the last key is in the full cache
    assert cache == {6: 6, 7: 7, 8: 8}
