"""Modules that `synkhronos.compat.hook.StandInFinder` provides under their own names."""
