"""Exchange of parameters by collectives."""
