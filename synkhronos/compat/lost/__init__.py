"""Modules that `synkhronos.compat.hook.GapFinder` provides under their own names."""
