"""Settings of a run: their sources, their checks, and Theano-MPI's session files."""
