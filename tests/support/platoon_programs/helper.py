"""A module beside a worker's file."""

WORD = "found"
