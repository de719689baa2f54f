"""tests/support/lint_names.py: its findings, and its comparison with the counts of lint_names.json."""

import json
import textwrap

import pytest
from lint_names import (
    BASELINE,
    Finding,
    check_names,
    count_by_rule,
    find_additions,
    find_missing_files,
    find_unlisted_imports,
)

WHOLE = '''
class Parcel:
    """A message and its attachments."""

    def weigh(self):
        """Return the weight in bytes."""

    def _send(self):
        pass
'''


def lint(source, **others):
    sources = {"synkhronos/one.py": source} | {f"synkhronos/{name}.py": text for name, text in others.items()}
    return [(finding.rule, finding.line, finding.text) for finding in check_names(sources)]


def test_lint_names_accepts_a_clean_file():
    assert lint(WHOLE) == lint(WHOLE.replace("its attachments", "a training\n    run")) == []
    directive = "attachments::\n\n        letter\n\n    .. math::\n       x\n\n    Attributes\n    ----------\n    a.\n    b\n    "
    assert lint(WHOLE.replace("attachments.", directive)) == []


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("Return the weight", "Return what it weighs", ("vague docstring", 5, "Return what")),
        ("Return the weight", "Measure. Returns the same", ("vague docstring", 5, "Returns the same")),
        ("A message", "Say how a message is sent", ("vague docstring", 2, "Say how")),
        ("A message", "Has a message", ("vague docstring", 2, "Has")),
        ("A message", "The same message", ("clause for a noun", 2, "The same message and its attachments.")),
        ("A message", "What is sent", ("clause for a noun", 2, "What is sent and its attachments.")),
        (
            "attachments.",
            "attachments::\n        letter, photo\n    ",
            ("no blank line after ::", 2, "A message and its attachments::"),
        ),
        ("attachments.", "attachments.\n    and more.\n    ", ("sentence in lower case", 2, "and more.")),
        (
            "attachments.",
            "attachments.\n\n    Attributes\n    ----------\n    sender : str\n        Who has sent it.\n    ",
            ("clause for a noun", 2, "Who has sent it."),
        ),
        ("    def _send", "    #: Of which kind.\n    def _send", ("clause for a noun", 8, "Of which kind.")),
        ("the weight in", "this class' weight in", ("clumsy phrase", 6, "\"class' \"; better: 's, as in the class's")),
        ("the weight in", "the weight as of `_send` in", ("clumsy phrase", 6, "'as of `'; better: as in `X`")),
        ("the weight in", "the gradient by", ("clumsy phrase", 6, "'Return the gradient by'; better: with respect to")),
        (
            "the weight in",
            "a value that is no weight in",
            ("clumsy phrase", 6, "'is no weight'; better: is not a, or are not"),
        ),
        ("the weight in", "the weight of a training in", ("clumsy phrase", 6, "'a training'; better: a training run")),
        ("def weigh", "def of", ("bare name", 5, "of")),
        ("def weigh", "def in_bytes", ("bare name", 5, "in_bytes")),
        ("        pass", "        by_rank = of_rank = 0", ("bare name", 9, "of_rank")),
        ("        pass", "        for each in ():\n            pass", ("bare name", 9, "each")),
        ("Return the weight in bytes.", "The weight.", ("short docstring", 5, "Parcel.weigh")),
        ('"""Return the weight in bytes."""', "pass", ("short docstring", 5, "Parcel.weigh")),
    ],
)
def test_lint_names_findings(before, after, finding):
    assert before in WHOLE
    assert lint(WHOLE.replace(before, after)) == [finding]


@pytest.mark.parametrize("base, count", [("Parcel", 0), ("object", 1)])
def test_lint_names_takes_a_docstring_of_a_base_class(base, count):
    source = f"{WHOLE}\n\nclass Letter({base}):\n    def weigh(self):\n        pass\n"
    assert [finding[0] for finding in lint(source)] == ["short docstring"] * count


def test_lint_names_finds_a_duplicate_class():
    other = textwrap.dedent('''
        class Parcel:
            """A message."""
    ''')
    assert lint(WHOLE, two=other) == [("class name in use", 2, "Parcel, also in synkhronos/one.py")]
    private = other.replace("Parcel", "_Parcel")
    assert lint(WHOLE, two=private) == [("class name in use", 2, "Parcel, also in synkhronos/one.py")]
    assert list(check_names({"synkhronos/compat/theano/one.py": other, "synkhronos/two.py": other})) == []


def test_lint_names_finds_an_unknown_parameter():
    source = textwrap.dedent('''
        def weigh(parcel, *extra, unit="g"):
            """Return the weight.

            Parameters
            ----------
            parcel, extra : Parcel
                Any number, of any kind.
            unit : {"g", "kg"}
            factor : float

            Returns
            -------
            weight : float
            """
    ''')
    assert lint(source) == [("unknown parameter documented", 2, "weigh: factor")]
    assert lint(source.replace('unit="g"', "**options")) == []


def test_lint_names_reads_descriptions_of_update_rules():
    source = textwrap.dedent("""
        @update_rule("learning_rate=0.25", 2.75, mask=None, beta2="The same for the largest size.")
        def adamax(p, g, c, learning_rate, beta2=0.9, mask=None):
            pass
    """)
    assert lint(source) == [("clause for a noun", 2, "The same for the largest size.")]
    assert lint(source.replace("The same for", "Decay of")) == []


def test_lint_names_requires_no_docstrings_outside_of_the_package():
    source = WHOLE.replace('"""Return the weight in bytes."""', "pass").replace("A message", "What is sent")
    lint = check_names({"tests/one.py": source, "tests/two.py": source})
    assert [finding.rule for finding in lint] == ["clause for a noun"] * 2


def test_lint_names_finds_imports_that_mypy_may_not_see():
    source = "import os, numpy.linalg, jaxlib.xla\nfrom jax import numpy\nfrom . import one\nfrom digits import load\n"
    sources = {"synkhronos/jaxlib/one.py": source, "demos/digits.py": ""}
    (finding,) = find_unlisted_imports(sources, ["jax.*"])
    assert (finding.line, finding.text) == (1, "jaxlib.xla")
    assert list(find_unlisted_imports(sources, ["jax.*", "jaxlib.*"])) == []


def test_lint_names_fails_only_on_additions():
    old = [Finding("bare name", path, 1, "of") for path in ("a", "a", "b")]
    moved = [finding._replace(path="c") for finding in old]
    assert (
        find_additions(old, count_by_rule(old))
        == find_additions(old[1:], count_by_rule(old))
        == find_additions(moved, count_by_rule(old))
        == []
    )
    assert find_additions([*old, *moved[:1]], count_by_rule(old)) == moved[:1]
    assert find_additions(old, {}) == old


def test_lint_names_finds_counts_of_missing_files():
    baseline = json.loads(BASELINE.read_text())
    assert find_missing_files(baseline) == []
    baseline["bare name"] = {"synkhronos/none.py": 1}
    assert find_missing_files(baseline) == ["synkhronos/none.py"]
