"""docs/damage.py reports damaged markup that reStructuredText accepts, and no correct markup."""

import importlib.util

import pytest
from docutils.core import publish_doctree
from paths import ROOT

WORDS = """
rank
   One process. They are numbered from 0.
host
   A machine, with memory,
   and cores.
"""
ITEM = """
- Python, with the same packages.
- The first ``mpirun`` on the path is used. MPICH 5 is known to
  work.
"""
TITLE = """
Rules
=====

On GPUs
~~~~~~~

One GPU takes 4 % of the time. Use ``---`` or ``- x``, 1 - 2
or 3 * 4.
"""
LIST = """
Two ways:

- the first
- the second
"""
TABLE = """
=============  ===============
With           Time
=============  ===============
MPICH 5.0.2    162 us
Open MPI 5.0   164 us
a third MPI    longer than all
that is slow   others are
=============  ===============
"""

#: Cases: correct markup, a string in it, the damaged string, and the message.
DAMAGE = {
    "term": (
        WORDS,
        "\nhost\n   A",
        "\nhost A",
        "a definition's first line in its term: 'host A machine, with memory,'",
    ),
    "items": (WORDS, "\nhost\n   A", " host A", "a definition list of one item: 'rank'"),
    "indent": (ITEM, "  work.", "    work.", "a definition list of one item: 'The first mpirun"),
    "quote": (LIST, "\n\n- the first", "\n\n  the first\n\n- the first", "an indented paragraph: 'the first'"),
    "title": (TITLE, "GPUs\n", "GPUs ", "the underline of a title in a paragraph: ' ~~~~~~~'"),
    "underline": (TITLE, "GPUs\n~~~~~~~", "GPUs\n\n~~~\nThree.", "the underline of a title in a paragraph: '~~~\\n'"),
    "list": (LIST, ":\n\n", ":\n", "an item of a list in a paragraph"),
    "percent": (TITLE, "4 %", "4\n%", "a line break between a number and its %: '4\\n%'"),
    "rows": (
        TABLE,
        "Open MPI 5.0 ",
        "             ",
        "two rows of a table in one, or a line that ends early: '162 us'",
    ),
}


@pytest.fixture(scope="module")
def find_damage():
    """Return a function from markup to messages."""
    spec = importlib.util.spec_from_file_location("damage", ROOT / "docs" / "damage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def find_messages(markup: str) -> list[str]:
        # docutils would report Sphinx's directives and roles as unknown.
        page = publish_doctree(markup, settings_overrides={"report_level": 5, "halt_level": 5})
        return [message for _, message in module.find_damage(page)]

    return find_messages


@pytest.mark.parametrize(("markup", "whole", "damaged", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found(find_damage, markup, whole, damaged, message):
    assert find_damage(markup) == []
    assert whole in markup
    messages = find_damage(markup.replace(whole, damaged))
    assert len(messages) == 1
    assert messages[0].startswith(message)


def test_pages_are_whole(find_damage):
    pages = [ROOT / "README.rst", ROOT / "CHANGES.rst", *(ROOT / "docs").glob("*.rst")]
    assert {page.name: messages for page in pages if (messages := find_damage(page.read_text()))} == {}
