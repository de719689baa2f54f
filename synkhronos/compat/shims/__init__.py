"""Modules that `synkhronos.compat.import_hooks.find_shim` provides under their own names."""
