"""Limits of deaths after which ``on_death="continue"`` ends a run."""

from synkhronos.training.loops.death_limit import DeathLimit


def test_rank_that_fails_to_start_twice_is_unusable():
    limit = DeathLimit(100)
    assert not limit.record_death(2) and not limit.is_rank_unusable
    assert not limit.record_death(0, is_failed_start=True) and not limit.is_rank_unusable
    assert not limit.record_death(1, is_failed_start=True) and not limit.is_rank_unusable  # another rank
    assert not limit.record_death(1, is_failed_start=True) and limit.is_rank_unusable
