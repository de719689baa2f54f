"""Reading of training rows from arrays, files and iterables, ahead of the computation.

A `Loader` reads the rows of a source (arrays, `npy`, `npz`, `hdf5`, `Images`, or any object with ``len()`` and
``[row]``) in loader processes, and augments them.  The processes write batches into a ring in shared memory, from
which all ranks read.  ``import synkhronos`` does not import this package.
"""

from synkhronos.loading.augment import CropMirror
from synkhronos.loading.loader import Loader
from synkhronos.loading.ring import LoadError
from synkhronos.loading.sources import Images, hdf5, image_folder, npy, npz

__all__ = ["CropMirror", "Images", "LoadError", "Loader", "hdf5", "image_folder", "npy", "npz"]
