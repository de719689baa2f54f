"""The parts of `JaxDevice`: XLA's stream, collectives within XLA programs, and logs of scalar outputs."""
