"""The process that the user starts: it starts the ranks, copies their output, and records how the run ends."""
