"""Loops over epochs and batches that trainers and the launcher share, and the signals and deaths that end them."""
