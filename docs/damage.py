"""Sphinx extension: warn where a page's markup has been damaged and reStructuredText still accepts the page.

When an editor wraps lines anew, list items, titles and table rows can become running text.  Sphinx builds such a page
without a warning.  The parsed page still shows the damage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

#: A table cell's line may be shorter than this part of its column only if the next word would not fit.
SHORT = 0.75
LITERAL = re.compile(r"``.*?``", re.DOTALL)
#: Patterns, outside of literals, of a paragraph that other markup has been joined to.
IN_PARAGRAPHS = {
    re.compile(r"(?:^|\s)([-=~^+#*\"'])\1{2,}(?:\s|$)"): "the underline of a title in a paragraph",
    re.compile(r"\n[-*] \S"): "an item of a list in a paragraph",
    re.compile(r"\d\n%"): "a line break between a number and its %",
}


def find_damage(page: nodes.document) -> Iterator[tuple[nodes.Element, str]]:
    """Yield the damaged elements of a parsed page.

    Parameters
    ----------
    page : docutils.nodes.document

    Yields
    ------
    element : docutils.nodes.Element
    message : str
        The kind of damage.

    Examples
    --------
    >>> from docutils.core import publish_doctree
    >>> [message for _, message in find_damage(publish_doctree("It takes 4\\n% of the time."))]
    ['a line break between a number and its %: "4\\n%"']
    """
    for definitions in page.findall(nodes.definition_list):
        # numpydoc turns a docstring's section into a field; a section with one entry is a list of one item there.
        if len(definitions) == 1 and not isinstance(definitions.parent, nodes.field_body):
            yield definitions, f"a definition list of one item: {definitions[0][0].astext()!r}"
    for term in page.findall(nodes.term):
        if term.astext().endswith(","):
            yield term, f"a definition's first line in its term: {term.astext()[-60:]!r}"
    for quote in page.findall(nodes.block_quote):
        yield quote, f"an indented paragraph: {quote.astext()[:60]!r}"
    for paragraph in page.findall(nodes.paragraph):
        source = LITERAL.sub("``literal``", paragraph.rawsource)
        for pattern, message in IN_PARAGRAPHS.items():
            if match := pattern.search(source):
                yield paragraph, f"{message}: {match[0]!r}"
    for columns in page.findall(nodes.tgroup):
        widths = [column["colwidth"] for column in columns.findall(nodes.colspec)]
        for row in columns.findall(nodes.row):
            for cell, width in zip(row, widths, strict=False):  # a cell may span columns
                for paragraph in cell.findall(nodes.paragraph):
                    yield from _short_lines(paragraph, width)


def _short_lines(paragraph: nodes.paragraph, width: int) -> Iterator[tuple[nodes.Element, str]]:
    """Yield a table cell's paragraph if it may be joined from the cells of two rows.

    In a simple table, a row whose first column is empty continues the row above it.
    """
    lines = paragraph.rawsource.splitlines()
    for line, following in zip(lines, lines[1:], strict=False):
        if len(line) + 1 + len(following.split()[0]) <= SHORT * width:
            yield paragraph, f"two rows of a table in one, or a line that ends early: {line!r}, {following!r}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Make Sphinx check each page that it reads."""
    from sphinx.util import logging

    logger = logging.getLogger(__name__)

    def check(app: Sphinx, page: nodes.document) -> None:
        for element, message in find_damage(page):
            logger.warning("%s", message, location=element)

    app.connect("doctree-read", check)
    return {"parallel_read_safe": True}
