"""`replication.user_code`: operations and programs that users edit while ranks run."""

import importlib
import os
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
from library import DEVICE, ENVIRONMENT_WITHOUT_COMPILER, HOSTS, NAME, Apply, Op, tensor

import synkhronos as synk
from synkhronos.functions.dispatcher import Dispatcher
from synkhronos.replication.user_code import UserCode, compute_digest, find_outdated_names, is_user_module

pytestmark = pytest.mark.skipif(DEVICE != "host", reason="neither XLA nor a GPU has operations written in Python")
IMPORTS = (
    "from pytensor.graph.basic import Apply\nfrom pytensor.graph.op import Op"
    if NAME == "pytensor"
    else "from theano.gof import Apply, Op"
)
SOURCE = """
FACTOR = {factor}

def scaled(value):
    return value * {scale}

class Scale(Op):
    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = scaled(inputs[0]) * FACTOR
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Give a function that writes a user's module, with another name in each test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"users_ops_{abs(hash(str(tmp_path)))}"

    def write(factor=1.0, scale=2.0, tail=""):
        source = IMPORTS + SOURCE.format(factor=factor, scale=scale) + textwrap.dedent(tail)
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield write
    sys.modules.pop(name, None)
    is_user_module.cache_clear()


def make_gather_function(operation):
    x = tensor.dvector("x")
    return synk.function([x], (operation(x), "gather"))


def call_with_ones(f, n=5):
    return f(np.ones(n)).tolist()


def test_user_code_of_a_reloaded_module_is_sent_again(fork, write):
    module = importlib.import_module(write(scale=2.0))
    fork(3)
    old = make_gather_function(module.Scale())
    assert call_with_ones(old) == [2.0] * 5
    write(scale=30.0)
    importlib.reload(module)
    assert call_with_ones(make_gather_function(module.Scale())) == [30.0] * 5
    # The old class calls the module's new function, as in a serial script.
    assert call_with_ones(old) == [30.0] * 5


def test_user_code_with_a_changed_global_is_sent_again(fork, write):
    module = importlib.import_module(write())
    fork(2)
    f = make_gather_function(module.Scale())
    assert call_with_ones(f) == [2.0] * 5
    for factor in (10.0, 7.0):
        module.FACTOR = factor
        assert call_with_ones(f) == [2 * factor] * 5
    module.FACTOR = 3.0
    assert call_with_ones(make_gather_function(module.Scale())) == [6.0] * 5


def test_user_code_with_a_replaced_method_is_sent_again(fork, write):
    module = importlib.import_module(write())
    fork(2)
    f = make_gather_function(module.Scale())
    assert call_with_ones(f) == [2.0] * 5

    def perform(self, node, inputs, outputs):
        outputs[0][0] = -inputs[0]

    module.Scale.perform = perform
    assert call_with_ones(f) == [-1.0] * 5


def test_user_code_with_a_redefined_class_is_sent_again(fork):
    def define(factor):
        class Again(Op):
            def make_node(self, x):
                return Apply(self, [x], [x.type()])

            def perform(self, node, inputs, outputs):
                outputs[0][0] = inputs[0] * factor

        Again.__qualname__ = "Again"
        sys.modules[__name__].Again = Again

    try:
        define(2.0)
        fork(3)
        first = make_gather_function(Again())  # noqa: F821
        assert call_with_ones(first) == [2.0] * 5
        define(3.0)
        second = make_gather_function(Again())  # noqa: F821
        assert call_with_ones(second) == [3.0] * 5
        assert call_with_ones(first) == [2.0] * 5
    finally:
        del sys.modules[__name__].Again


def test_user_op_from_an_unknown_folder_works(write, two_ranks_per_test):
    module = importlib.import_module(write(factor=5.0))
    assert call_with_ones(make_gather_function(module.Scale())) == [10.0] * 5


def test_user_op_defined_in_a_function_works(fork):
    class Negative(Op):
        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = -inputs[0]

    fork(2)
    assert call_with_ones(make_gather_function(Negative())) == [-1.0] * 5


WRAP_FUNCTION = "wrap_py" if NAME == "pytensor" else "as_op"
FUNCTION_OP = f"""
from {NAME}.compile.ops import {WRAP_FUNCTION}
from {NAME}.tensor import dvector

@{WRAP_FUNCTION}(itypes=[dvector], otypes=[dvector])
def scale(x):
    return scaled(x) * FACTOR
"""


def test_op_made_of_a_function_is_sent_again(fork, write):
    module = importlib.import_module(write(tail=FUNCTION_OP))
    fork(2)
    old = make_gather_function(module.scale)
    assert call_with_ones(old) == [2.0] * 5
    write(tail=FUNCTION_OP.replace("FACTOR", "15"))
    importlib.reload(module)
    assert call_with_ones(make_gather_function(module.scale)) == [30.0] * 5
    assert call_with_ones(old) == [2.0] * 5


def test_op_made_of_a_function_defined_after_fork_works(two_ranks_per_test):
    namespace = {"scaled": lambda value: value * 2, "FACTOR": 3.0, "__name__": "__main__"}
    exec(FUNCTION_OP, namespace)
    assert call_with_ones(make_gather_function(namespace["scale"])) == [6.0] * 5


def test_unchanged_user_code_is_sent_once(fork, write, monkeypatch):
    module = importlib.import_module(write(tail="def unused():\n    return FACTOR\n"))
    fork(2)
    f = make_gather_function(module.Scale())
    call_with_ones(f)
    sent = []
    monkeypatch.setattr(Dispatcher, "mark_distributed", lambda self, session: sent.append(self))
    call_with_ones(f)
    module.unused = None
    importlib.reload(module)  # with the same code
    assert call_with_ones(f) == [2.0] * 5
    assert not sent


@pytest.mark.parametrize(
    "definition",
    [
        "import functools\n@functools.cache\ndef get():\n    return {k}\ndef h(x): return get() * x",
        "import functools\nh = functools.partial(lambda x, k: k * x, k={k})",
        "import functools\nclass D:\n    k = {k}\n    h = functools.partialmethod(lambda self, x: self.k * x)\nh = D().h",
        "import numpy as np\nh = np.vectorize(lambda x: {k} * x)",
        "class C:\n    def __call__(self, x): return {k} * x\nh = C()",
        "def decorate(f): return lambda x: f(x)\n@decorate\ndef h(x): return {k} * x",
        pytest.param(
            "import numba\n@numba.njit\ndef h(x): return {k} * x",
            marks=pytest.mark.skipif(NAME == "theano", reason="Numba"),
        ),
    ],
)
def test_user_code_in_wrappers_and_attributes_of_modules_is_sent_again(fork, write, tmp_path, definition):
    file = tmp_path / "users_helpers.py"
    file.write_text(definition.format(k=2.0))
    module = importlib.import_module(
        write(
            tail="""
            import users_helpers

            class Help(Scale):
                def perform(self, node, inputs, outputs):
                    outputs[0][0] = users_helpers.h(inputs[0])
            """
        )
    )
    try:
        fork(2)
        module.users_helpers.user = module  # modules may import each other
        f = make_gather_function(module.Help())
        assert call_with_ones(f) == [2.0] * 5
        for k in (10.0, 7.0):
            file.write_text(definition.format(k=k))
            importlib.reload(module.users_helpers)
            assert call_with_ones(f) == [k] * 5
        assert call_with_ones(make_gather_function(module.Help())) == [7.0] * 5
    finally:
        sys.modules.pop("users_helpers", None)


def test_global_that_functions_of_its_module_set_is_state_of_a_process(fork, write):
    module = importlib.import_module(write(tail="def set_factor(value):\n    global FACTOR\n    FACTOR = value\n"))
    fork(2)
    f = make_gather_function(module.Scale())
    assert call_with_ones(f, 2) == [2.0, 2.0]
    module.set_factor(10.0)
    assert call_with_ones(f, 2) == [20.0, 2.0]  # the worker's own value is not replaced


def test_state_of_user_code_is_not_compared(fork, write):
    module = importlib.import_module(
        write(
            tail="""
            COUNT = 0

            class Count(Scale):
                def perform(self, node, inputs, outputs):
                    global COUNT
                    COUNT += 1
                    outputs[0][0] = inputs[0] + COUNT

            def count():
                this.COUNT += 1
                return this.COUNT

            class CountByAttribute(Scale):
                def perform(self, node, inputs, outputs):
                    outputs[0][0] = inputs[0] + count()
            """
        )
    )
    module.this = module
    fork(2)
    for operation in (module.Count(), module.CountByAttribute()):
        module.COUNT = 0
        f = make_gather_function(operation)
        counts = [call_with_ones(f, 2) for _ in range(3)]
        assert [first for first, _ in counts] == [2, 3, 4]
        assert [second - counts[0][1] for _, second in counts] == [0, 1, 2]  # neither sent nor reset


@pytest.mark.skipif(bool(HOSTS), reason="workers that are forks of this process")
def test_programs_edited_after_fork_are_sent_to_all_ranks(fork, monkeypatch):
    module = types.ModuleType("edited_programs")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def define(code):  # as a notebook cell does
        exec(code, vars(module))

    define("def get_version(): return 1\ndef program(context): return get_version(), context.number, rate")
    define("calls = []\ndef count(context): calls.append(0); return len(calls)\nrate = 5")
    fork(2)
    assert synk.run(module.program) == [(1, 0, 5), (1, 1, 5)]
    assert synk.run(module.count) == [1, 1]
    define("rate = 6")
    assert synk.run(module.program) == [(1, 0, 6), (1, 1, 5)]  # a value is state of a process
    define("def get_version(): return 2")
    assert synk.run(module.program) == [(2, 0, 6), (2, 1, 6)]
    for version in (3, 4):
        define(f"import functools\n@functools.cache\ndef get_version(): return {version}")
        assert synk.run(module.program) == [(version, 0, 6), (version, 1, 6)]
    assert synk.run(module.count) == [2, 2]  # code that has not changed keeps its variables
    define("def added(context): return rate, get_version()")
    assert synk.run(module.added) == [(6, 4)] * 2
    define("import edited_programs\nby_module = lambda context: edited_programs.get_version() + context.number")
    assert synk.run(module.by_module) == [4, 5]


def test_digest_distinguishes_code(write):
    name = write()
    module = importlib.import_module(name)
    code = UserCode()
    code.add(module.Scale, is_by_name=True)
    code.update_digests()
    assert not code.update_if_changed()
    assert find_outdated_names(code.list_digests()) == ()
    assert find_outdated_names([((name, "Missing"), b"")]) == ((name, "Missing"),)
    assert find_outdated_names([(("no_such_module", "Op"), b"")]) == (("no_such_module", "Op"),)
    before = compute_digest(module.Scale)
    for change in ("FACTOR", "scaled"):
        old = getattr(module, change)
        setattr(module, change, (lambda value: value) if callable(old) else np.float32(7))
        assert compute_digest(module.Scale) != before
        assert find_outdated_names(code.list_digests()) == ((name, "Scale"),)
        setattr(module, change, old)
        assert compute_digest(module.Scale) == before
    module.scaled.__code__ = module.scaled.__code__.replace(co_consts=(None, 5.0))
    assert compute_digest(module.Scale) != before


def test_digest_does_not_depend_on_the_hash_seed(write, tmp_path):
    tail = """
        def classify(word):
            def is_vowel(letter):
                return letter in {"a", "e", "i", "o", "u"}

            return word in {"b", "d", "c", None, 1.5, ("f", "e")} or is_vowel(word[0])
        """
    program = f"""
        import importlib
        from synkhronos.replication.user_code import compute_digest

        print(compute_digest(importlib.import_module("{write(tail=tail)}").classify).hex())
        """
    path = os.pathsep.join([str(tmp_path), *sys.path])
    digests = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**os.environ, **ENVIRONMENT_WITHOUT_COMPILER, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("constant", "other"),
    [
        (frozenset("ab"), frozenset("ac")),
        (frozenset("ab"), ("a", "b")),
        (((1, 2), 3), (1, (2, 3))),
        ((frozenset("ab"),), (frozenset("ac"),)),
        (1, True),
        (1, "1"),
    ],
)
def test_digest_distinguishes_constants(constant, other):
    def get_constant():
        return None

    digests = []
    for value in (constant, other):
        get_constant.__code__ = get_constant.__code__.replace(co_consts=(None, value))
        digests.append(compute_digest(get_constant))
    assert digests[0] != digests[1]


def test_installed_code_is_not_user_code():
    assert is_user_module(__name__)
    assert not any(is_user_module(name) for name in ("json", "numpy", NAME, "synkhronos.data", "no_such_module", None))


def test_code_installed_elsewhere_is_not_user_code(monkeypatch, tmp_path):
    # Installed code would be read whole for each function, and may differ between ranks.
    def classify(name, file):
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, name, module)
        return is_user_module.__wrapped__(name)

    (tmp_path / "site" / "a_library-1.0.dist-info").mkdir(parents=True)
    assert not classify("a_library", "site/a_library/__init__.py")
    assert not classify("a_library.inner", "site/a_library/inner/__init__.py")
    assert not classify("a_library.inner.most", "site/a_library/inner/most.py")
    assert not classify(f"{NAME}.made_up", f"sources/{NAME}/made_up.py")
    assert classify("a_program", "program.py")
    assert classify("a_program.inner.most", "a_program/inner/most.py")
