"""Folders of checkpoints, and the state of every rank in them."""
