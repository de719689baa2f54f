"""Schedules of learning rates, and their states in checkpoints."""

import math

import pytest
from messages import raises

from synkhronos.training import schedules
from synkhronos.training.schedules import get_state, reset_best, set_state


class UserSchedule:
    """A schedule of the user's own, with attributes of `plateau`'s names."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, epoch):
        return 0.1

    def __repr__(self):
        return repr(vars(self))

    def observe(self, value):
        pass


def make_schedule():
    return schedules.warmup(schedules.scaled(schedules.plateau(0.1, 0.5, 2), 4), epochs=2, start=0.5)


def test_schedules_can_be_combined():
    schedule = make_schedule()
    assert [schedule(e) for e in (0, 1, 2, 3)] == pytest.approx([0.2, 0.3, 0.4, 0.4])
    for value in (1.0, 1.1, 1.2):
        schedule.observe(value)
    assert schedule(3) == pytest.approx(0.2)


def test_rate_stays_at_its_minimum():
    plateau = schedules.plateau(0.1, factor=0.5, patience=1, min_rate=0.04)
    rates = []
    for _ in range(4):
        plateau.observe(1.0)
        rates.append(plateau(0))
    assert rates == [0.1, 0.05, 0.04, 0.04]
    assert schedules.cosine(0.1, epochs=5, min_rate=0.04)(6) == pytest.approx(0.04)


def test_restored_schedule_continues_alike():
    schedule, other = make_schedule(), make_schedule()
    for value in (1.0, 1.1, 1.2, 1.3):  # the rate has fallen, and one bad report is counted
        schedule.observe(value)
    set_state(other, get_state(schedule))
    for restored in (schedule, other):
        restored.observe(5.0)
    assert other(3) == schedule(3) == pytest.approx(0.1)


def test_reset_best_keeps_the_rate():
    schedule = make_schedule()
    for value in (1.0, 1.1, 1.2):
        schedule.observe(value)
    reset_best(schedule)
    assert get_state(schedule) == {
        "identity": ["plateau", 0.1],
        "rate": pytest.approx(0.05),
        "n_bad_reports": 0,
    }


def test_reset_best_leaves_schedules_of_the_user_unchanged():
    user_schedule = UserSchedule(best=-math.inf)  # of a metric for which more is better
    reset_best(schedules.scaled(user_schedule, 2))
    assert user_schedule.best == -math.inf


def test_restored_state_without_a_report_has_no_best_value():
    schedule = make_schedule()
    schedule.observe(0.5)
    set_state(schedule, get_state(schedules.plateau(0.1, 0.5, 2)))  # of a checkpoint before the first value
    assert get_state(schedule) == {"identity": ["plateau", 0.1], "rate": 0.1, "n_bad_reports": 0}


# A schedule of the epoch has no state.
@pytest.mark.parametrize(
    "old", [schedules.constant(0.1), schedules.steps(0.1, {5: 0.1}), schedules.warmup(0.1, 5), make_schedule()]
)
def test_schedule_ignores_states_of_others(old):
    # The last two are a schedule of another kind, and one with another initial rate.
    for new in (
        schedules.constant(0.01),
        schedules.warmup(schedules.cosine(0.01, 9), 5),
        UserSchedule(rate=3.0),
        schedules.plateau(0.01, 0.5, 2),
    ):
        before = repr(new)
        set_state(new, get_state(old))
        assert repr(new) == before


def test_schedules_refuse_wrong_numbers():
    for wrong in (
        lambda: schedules.steps(-1, {}),
        lambda: schedules.cosine(0.1, 0),
        lambda: schedules.steps(1, {2: 0}),
    ):
        with pytest.raises(ValueError, match="expected a positive number"):
            wrong()


def test_schedules_refuse_bounds_that_raise_the_rate():
    with raises(ValueError, "min_rate"):
        schedules.plateau(0.001, min_rate=0.01)
    with raises(ValueError, "min_rate"):
        schedules.cosine(0.1, 5, min_rate=-0.1)
    with raises(ValueError, "factor"):
        schedules.plateau(0.1, factor=10.0)
    with raises(ValueError, "start"):
        schedules.warmup(0.1, 5, start=2)
