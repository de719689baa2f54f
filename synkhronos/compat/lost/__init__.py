"""Modules that `synkhronos.compat.gaps` gives back under their own names."""
