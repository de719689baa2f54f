"""A user-defined exchange rule: the recipe of docs/extending.rst."""

import numpy as np
import pytest
from library import shared
from rule_programs import Halfway

import synkhronos as synk
from synkhronos.exchange_rules import ExchangeState

pytestmark = pytest.mark.new_ranks  # workers that have imported the rule


def exchange_once(context, rule, parameter):
    """Exchange when rank r's parameters are all r; return its parameters."""
    state = ExchangeState([parameter], [], {})
    rule.setup(context, state)
    state.vector = np.full(4, float(context.number))
    rule.exchange(context, state)
    return np.asarray(parameter.get_value())


def test_own_rule_moves_ranks_towards_their_mean(fork):
    fork(3)
    parameter = shared(np.zeros((2, 2)), "w")
    assert [w.tolist() for w in synk.run(exchange_once, Halfway(), parameter)] == [[[m, m]] * 2 for m in (0.5, 1, 1.5)]
