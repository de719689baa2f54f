"""Patterns that rewrites of this package and of `extensions` look for in graphs."""

from __future__ import annotations

from types import UnionType

from pytensor.tensor.elemwise import Elemwise

from synkhronos.variable_types import Node

__all__ = ["is_elementwise"]


def is_elementwise(node: Node | None, scalar_op: type | UnionType) -> bool:
    """Whether a variable's owner applies a scalar function elementwise; False for the owner of an input, None."""
    return node is not None and isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar_op)
