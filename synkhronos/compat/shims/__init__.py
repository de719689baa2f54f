"""Modules that `synkhronos.compat.import_hooks.ShimFinder` provides under their own names."""
