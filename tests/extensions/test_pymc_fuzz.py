"""A short run of `fuzz_pymc`: random models on ranks equal PyMC's."""

import warnings

import numpy as np
import pytest
from library import XLA

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    pytest.importorskip("pymc", reason="the extra `pymc` is not installed")
    from fuzz_pymc import Case

pytestmark = [
    pytest.mark.usefixtures("rewrites"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(XLA, reason="the rewrites of points far from the data are compared"),
]


@pytest.mark.parametrize(("n_ranks", "seed"), [(2, 1004), (3, 1013)])
def test_random_models_match_pymc(fork, n_ranks, seed):
    fork(n_ranks)
    with np.errstate(all="ignore"):
        case = Case(seed)
        case.check(checks_value_alone=seed % 2 == 0)
        case.check_log_likelihood()
