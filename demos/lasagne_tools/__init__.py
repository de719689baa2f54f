"""Modules shared by the demos with Lasagne: layers, command line arguments, a loop over epochs, and results."""
