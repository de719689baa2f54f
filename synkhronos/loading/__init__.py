"""How do rows come from files?

`Loader`
    Reads batches ahead, in processes of its own, into memory that all ranks see (`loader`).
`npy`, `npz`, `hdf5`, `Images`, `image_folder`
    What it reads (`sources`); or arrays, or any object with ``len()`` and ``[row]``, or any iterable.
`CropMirror`
    What happens to a row on the way (`augment`).
`LoadError`
    A row can't be read, or a loader has died.

What a loader process does is in `process`, how it and the ranks keep in step in `ring`.  Not imported by
``import synkhronos``.
"""

from synkhronos.loading.augment import CropMirror
from synkhronos.loading.loader import Loader
from synkhronos.loading.ring import LoadError
from synkhronos.loading.sources import Images, hdf5, image_folder, npy, npz

__all__ = ["CropMirror", "Images", "LoadError", "Loader", "hdf5", "image_folder", "npy", "npz"]
