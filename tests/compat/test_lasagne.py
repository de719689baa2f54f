"""Lasagne 0.1's own tests, on this environment's ``theano``: tests that pass on Theano 1.0.5 pass on PyTensor.

``lasagne_outcomes.json`` says which don't pass on either, and which don't on one of the two, with the reasons.  A test
that has begun to pass has to be taken off the list.
"""

import json
from pathlib import Path

import pytest
from lasagne_suite import NoPackage, run

import synkhronos.compat

LISTED = json.loads((Path(__file__).parent / "lasagne_outcomes.json").read_text())


def test_lasagnes_tests_pass():
    try:
        outcomes = run()
    except NoPackage as error:
        pytest.skip(str(error))
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    only = {"theano": "Theano 1.0.5", "pytensor": "PyTensor"}[synkhronos.compat.library]
    listed = [*LISTED["fails on both"].values(), *LISTED[f"fails on {only} only"].values()]
    assert failed == {name for names in listed for name in names}
    assert len(outcomes) == LISTED["tests"]
