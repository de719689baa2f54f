"""Limits of deaths after which ``on_death="continue"`` ends a training."""

from synkhronos.training.loops.death_limit import DeathLimit


def test_deaths_since_the_last_copy_are_limited():
    limit = DeathLimit(100)
    assert [limit.record_death(rank) for rank in (1, 2, 1)] == ["", "", ""]
    limit.reset_deaths_since_copy()
    assert [limit.record_death(1) for _ in range(3)] == ["", "", ""]
    assert "exceed the limit of 3" in limit.record_death(1)


def test_rank_that_fails_to_start_twice_is_unusable():
    limit = DeathLimit(100)
    assert not limit.record_death(2) and not limit.is_rank_unusable
    assert not limit.record_death(0, is_failed_start=True) and not limit.is_rank_unusable
    assert not limit.record_death(1, is_failed_start=True) and not limit.is_rank_unusable  # another rank
    assert not limit.record_death(1, is_failed_start=True) and limit.is_rank_unusable


def test_max_deaths_limits_all_deaths():
    limit = DeathLimit(2)
    for rank in (1, 2):
        assert not limit.record_death(rank)
        limit.reset_deaths_since_copy()
    assert "3 deaths exceed max_deaths=2" in limit.record_death(1)
