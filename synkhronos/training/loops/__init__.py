"""Loops over epochs and batches, shared by trainers and the launcher, and the signals and deaths that end them."""
