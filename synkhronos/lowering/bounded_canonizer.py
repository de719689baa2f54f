"""A bound on the size of PyTensor's canonical sums and products, in all functions compiled in this process.

PyTensor's canonical form of a sum of sums is one sum of all terms.  A variable that occurs twice is expanded twice, so
the number of terms at least doubles with each level.  The lengths that PyTensor infers for stacked concatenations are
such sums: six levels of four branches have 4096 terms.  Here a sum is only expanded if the graph becomes smaller.
"""

from __future__ import annotations

import copy
from typing import Any

from pytensor.tensor.rewriting.math import AlgebraicCanonizer, local_add_canonizer, local_mul_canonizer

from synkhronos.variable_types import Variable

#: Maximal number of terms of a sum that is always expanded.
MAX_ALWAYS_EXPANDED = 8


class _BoundedCanonizer:
    """A canonizer that does not expand sums or products if the graph would grow."""

    def __init__(self, canonizer: AlgebraicCanonizer):
        self._canonizer = canonizer
        self._operations = {canonizer.main, canonizer.inverse, canonizer.reciprocal}

    def get_num_denum(self, variable: Variable) -> tuple[list[Any], list[Any]]:
        """Return the positive and the negative terms of a sum, or the factors and divisors of a product.

        If there are more terms than inputs of the nodes that they replace, the graph would grow.  The variable itself
        is then returned.
        """
        counts: dict[Any, int] = {}
        terms = self._count_terms(variable, counts)
        if terms > MAX_ALWAYS_EXPANDED and terms > sum(len(node.inputs) for node in counts):
            return [variable], []
        return self._canonizer.get_num_denum(variable)

    def _count_terms(self, variable: Variable, counts: dict[Any, int]) -> int:
        """Return the number of terms of a variable.  ``counts`` collects the numbers of the nodes in its expression."""
        node = variable.owner
        if node is None or node.op not in self._operations:
            return 1
        if node not in counts:
            counts[node] = sum(self._count_terms(v, counts) for v in node.inputs)
        return counts[node]


for _canonizer in (local_add_canonizer, local_mul_canonizer):
    _canonizer.get_num_denum = _BoundedCanonizer(copy.copy(_canonizer)).get_num_denum
