"""Graph libraries of variables, and traversal of graphs."""

import importlib
import pickle

import numpy as np
import pytest
from library import NAME, package, shared
from library import tensor as T
from messages import raises

from synkhronos.graph_libraries import apply_settings, get_library, list_loaded_libraries, list_settings
from synkhronos.graph_libraries.library import has_other_references

LIBRARY = get_library(T.dscalar())


# -- settings ------------------------------------------------------------------------------------------------------


def test_settings_of_the_script_are_applied_in_another_process(monkeypatch):
    config = package.config
    monkeypatch.setattr(config, "floatX", "float32")
    settings = list_settings()
    assert settings[NAME]["floatX"] == "float32"
    assert not {"compiledir", "blas__ldflags", "blas.ldflags"} & settings[NAME].keys()  # of the machine
    config.floatX = "float64"
    apply_settings(settings)
    assert config.floatX == "float32"


# -- keys of compiled C modules, which ranks share ---------------------------------------------------------------


class ReadsKeyFile:
    """Key that reads the key file while it is pickled, as another rank may."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        keys = pickle.loads(self.path.read_bytes()).keys
        return tuple, (("seen", *keys),)


class Unpicklable:
    """An object whose pickling fails."""

    def __reduce__(self):
        raise pickle.PicklingError("no")


def test_c_module_keys_are_written_atomically(tmp_path):
    cmodule = importlib.import_module("pytensor.link.c.cmodule" if NAME == "pytensor" else "theano.gof.cmodule")
    path = tmp_path / "key.pkl"
    data = cmodule.KeyData(set(), "hash", str(path), "entry")
    data.add_key((1, "first"))
    data.add_key((1, ReadsKeyFile(path)))
    assert pickle.loads(path.read_bytes()).keys == {(1, "first"), (1, ("seen", (1, "first")))}
    with pytest.raises(pickle.PicklingError):
        data.add_key((1, Unpicklable()))
    assert len(pickle.loads(path.read_bytes()).keys) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["key.pkl"]


# -- get_library ------------------------------------------------------------------------------------------------


def test_get_library_returns_the_library_of_variables():
    for variable in (T.matrix("x"), T.matrix("x").sum(), shared(1.0), T.constant(1.0)):
        assert get_library(variable) is LIBRARY
    assert get_library(T.matrix("x"), shared(1.0)) is LIBRARY
    assert LIBRARY.name == NAME


def test_only_the_imported_library_is_loaded():
    assert [library.name for library in list_loaded_libraries()] == [NAME]


@pytest.mark.parametrize("value", [1.0, np.ones(2), "x", None, object()])
def test_get_library_refuses_non_variables(value):
    with raises(TypeError):
        get_library(value)
    with raises(TypeError):
        get_library(T.vector(), value)


def test_get_library_needs_a_variable():
    with raises(TypeError):
        get_library()


def test_library_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(LIBRARY)) is LIBRARY


def test_references_to_a_containers_value_are_detected():
    variable = shared(np.zeros(3))
    assert not has_other_references(variable.container.storage)
    borrowed = LIBRARY.borrow_value(variable)
    assert has_other_references(variable.container.storage)
    del borrowed
    assert not has_other_references(variable.container.storage)


# -- graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(NAME != "theano", reason="about Theano's construction observers")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_failed_compilation_restores_construction_observers(error):
    from theano.compile.mode import Mode
    from theano.gof.opt import Optimizer, inherit_stack_trace

    class FailingOptimizer(Optimizer):
        def apply(self, graph):
            with inherit_stack_trace(graph.outputs[0]):
                raise error

    x = T.vector("x")
    before = list(x.construction_observers)
    with pytest.raises(error):
        LIBRARY.function([x], x.sum(), mode=Mode(linker="py", optimizer=FailingOptimizer()))
    assert x.construction_observers == before


def test_sort_nodes_puts_dependencies_first():
    x, y = T.vectors("x", "y")
    a = x + y
    outputs = [T.exp(a) * a, T.log(a), a.sum()]
    nodes = LIBRARY.sort_nodes(outputs)
    assert len(nodes) == len({id(node) for node in nodes})
    assert all(output.owner in nodes for output in outputs)
    for position, node in enumerate(nodes):
        for variable in node.inputs:
            assert variable.owner is None or variable.owner in nodes[:position]


def test_sort_nodes_accepts_deep_graphs():
    x = T.vector("x")
    for _ in range(5000):
        x = x + 1
    assert len(LIBRARY.sort_nodes([x])) >= 5000


def test_variables_without_a_graph_have_no_nodes():
    assert LIBRARY.sort_nodes([T.vector("x"), shared(1.0), T.constant(2.0)]) == []


def test_find_shareds_lists_each_variable_once():
    a, b, c = shared(1.0, "a"), shared(2.0, "b"), shared(3.0, "c")
    x = T.scalar("x")
    shareds = LIBRARY.find_shareds([x * a + b, (a + b) * 2, c])
    assert {variable.name for variable in shareds} == {"a", "b", "c"} and len(shareds) == 3
    assert LIBRARY.find_shareds([x * 2]) == []


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
def test_find_shareds_finds_default_updates():
    step, count = shared(1.0, "step"), shared(0.0, "count")
    count.default_update = count + step * 2
    for variables in ([count], [count * 3]):
        assert {variable.name for variable in LIBRARY.find_shareds(variables)} == {"count", "step"}
        assert count.default_update.owner in LIBRARY.sort_nodes(variables)


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
def test_find_shareds_finds_a_variable_that_is_a_default_update():
    first, second = shared(1.0, "first"), shared(2.0, "second")
    first.default_update, second.default_update = second, first
    assert LIBRARY.find_shareds([first + 1]) == [first, second]


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
def test_find_shareds_finds_default_updates_of_default_updates():
    first, second, rate = shared(1.0, "first"), shared(2.0, "second"), shared(3.0, "rate")
    first.default_update, second.default_update = second, second * rate
    assert {variable.name for variable in LIBRARY.find_shareds([first + 1])} == {"first", "second", "rate"}


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
def test_find_shareds_accepts_cyclic_default_updates():
    a, b = shared(1.0, "a"), shared(2.0, "b")
    a.default_update, b.default_update = a + b, b - a
    assert {variable.name for variable in LIBRARY.find_shareds([a])} == {"a", "b"}


def test_find_shareds_finds_variables_of_a_scan():
    w = shared(2.0, "w")
    x = T.dscalar("x")
    package = LIBRARY.package
    if NAME == "pytensor":
        powers = package.scan(lambda a: a * w, outputs_info=[x], n_steps=3, return_updates=False)
    else:
        powers, _ = package.scan(lambda a: a * w, outputs_info=[x], n_steps=3)
    assert w in LIBRARY.find_shareds([powers])


def test_clone_replaces_variables():
    s, x = shared(np.arange(4.0), "s"), T.dscalar("x")
    (clone,) = LIBRARY.clone([s.sum() * x], {s: s[1:3]})
    assert LIBRARY.function([x], clone)(2.0) == 6


# -- values ----------------------------------------------------------------------------------------------------


def test_container_array_is_read_and_written():
    value = np.arange(3.0)
    s = shared(value, "s")
    borrowed = LIBRARY.borrow_value(s)
    borrowed[0] = 7
    np.testing.assert_array_equal(s.get_value(), [7, 1, 2])
    LIBRARY.store_value(s, value)
    assert LIBRARY.borrow_value(s) is value


def test_container_refuses_values_of_another_type():
    s = shared(np.arange(3.0), "s")
    with pytest.raises(TypeError):
        LIBRARY.store_value(s, np.zeros((2, 2)))


def test_static_lengths_are_read_from_a_type():
    assert LIBRARY.get_static_shape(T.matrix()) == (None, None)
    assert LIBRARY.get_static_shape(T.row()) == (1, None)
    assert LIBRARY.get_static_shape(T.scalar()) == ()
    s = shared(np.zeros((2, 3)))
    assert LIBRARY.accepts_shape(s, (5, 0)) and not LIBRARY.accepts_shape(s, (5,))


def test_inputs_are_cast_like_the_library():
    entry = LIBRARY.make_input_spec(T.fvector("x"))
    assert entry.name == "x" and not entry.mutable
    filtered = LIBRARY.filter(entry.variable.type, [1, 2])
    assert filtered.dtype == "float32"
    with pytest.raises(TypeError):
        LIBRARY.filter(entry.variable.type, np.zeros(2))
    generous = LIBRARY.make_input_spec(LIBRARY.package.In(T.fvector("x"), name="z", mutable=True, allow_downcast=True))
    assert generous.name == "z" and generous.mutable
    assert (
        LIBRARY.filter(generous.variable.type, np.zeros(2), allow_downcast=generous.allow_downcast).dtype == "float32"
    )


def test_generators_are_distinguished_from_arrays():
    assert not LIBRARY.is_generator(shared(np.ones(3)))
    if NAME == "pytensor":
        assert LIBRARY.is_generator(shared(np.random.default_rng(1)))
    else:
        from theano.sandbox.rng_mrg import MRG_RandomStreams

        assert LIBRARY.is_generator(T.shared_randomstreams.RandomStreams(1).normal().owner.inputs[0])
        draw = MRG_RandomStreams(1).uniform(size=(2,))
        (state,) = LIBRARY.find_shareds([draw])
        assert LIBRARY.is_generator(state)
