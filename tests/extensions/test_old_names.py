"""The 2017 names of modules that have moved."""

from synkhronos import training
from synkhronos.extensions import train, updates


def test_old_module_names_export_the_same_functions():
    assert train.make_train_function is training.make_train_function
    assert updates.adam is training.updates.adam and set(updates.__all__) == set(training.updates.__all__)
