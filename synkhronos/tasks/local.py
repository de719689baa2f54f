"""Compiled functions and data, on one rank alone.

`LocalFunction`
    A function that one rank calls for itself.
`LocalRows`
    A Data object, or rows of one, as a rank's program sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos.casts import cast
from synkhronos.data.array import as_numpy
from synkhronos.data.rows import max_row, min_row, select
from synkhronos.devices import HOST, JAX, Device, Selection, take
from synkhronos.engines import Runner
from synkhronos.function.program import PLAIN, Program
from synkhronos.ranks import Rank, SharedArray
from synkhronos.ranks.task import Span, Task


class LocalRows:
    """Rows of an array in memory that all ranks see; what a program gets for a `synkhronos.Data`.

    ``rows[selection]`` is some of them, in the order asked for: what a call's ``batch`` may be.  They are copied when a
    function is called with them, or when NumPy reads them.

    Attributes
    ----------
    here : range
        The rows of the whole array that this rank's host has: all, but of `synkhronos.data_parts` on several hosts.
    """

    def __init__(self, rank: Rank, location: SharedArray, rows: Selection | None = None):
        self._rank = rank
        self.location = location
        self.selected = rows
        self._array = location.view(rank.segments)
        rows = location.rows_of(rank.size, rank.control.here)
        self.here = range(*self._array.shape[:1] or (0,)) if rows is None else rows

    @property
    def array(self) -> np.ndarray:
        """All of it: the memory itself, which all ranks may read and write."""
        self._check_here(None)
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return self._array.shape if self.selected is None else (len(self.selected), *self._array.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._array.ndim

    def __len__(self) -> int:
        return len(self._array if self.selected is None else self.selected)

    def __getitem__(self, selection: Any) -> LocalRows:
        rows, known = select(selection, len(self), "rows"), self.selected
        if isinstance(known, range) and isinstance(rows, range):
            start, stop = (known.start + known.step * bound for bound in (rows.start, rows.stop))
            rows = range(start, stop, known.step * rows.step)
        elif known is not None:
            rows = np.asarray(known)[np.asarray(rows)]
        self._check_here(rows)
        return LocalRows(self._rank, self.location, rows)

    def _check_here(self, rows: Selection | None) -> None:
        """Refuse rows that another host has loaded for itself."""
        here = self.here
        if self.ndim and len(here) < len(self._array):
            rows = range(len(self._array)) if rows is None else rows
            if len(rows) and not (min_row(rows) >= here.start and max_row(rows) < here.stop):
                raise IndexError(
                    f"rows {min_row(rows):,} to {max_row(rows):,} are not all here: of the {len(self._array):,} that "
                    f"data_parts has loaded, rank {self._rank.number}'s host has {here.start:,} to {here.stop - 1:,} "
                    "(rows.here)"
                )

    @property
    def span(self) -> Span:
        """Where the rows lie, if they are one after the other: for `Lock.read` and `Lock.write`."""
        rows, key = self.selected, self.location.key
        if self._rank.segments[key].is_file:
            raise ValueError("rows: expected rows in memory that ranks write, got rows of a file")
        if rows is None:
            return key, self.location.offset, self._array.nbytes
        if not isinstance(rows, range) or rows.step != 1:
            raise ValueError("rows: expected rows that lie one after the other, such as rows[3:5]")
        each = self._array[0].nbytes if len(self._array) else 0
        return key, self.location.offset + rows.start * each, len(rows) * each

    def on(self, device: Device) -> Any:
        """Return the rows as a new array of a device's."""
        return device.load(self._rank, self.location, self.checked())

    def checked(self) -> Selection | None:
        """Return which rows these are, all of them here; None for the whole array."""
        if self.selected is None:
            self._check_here(None)
        return self.selected

    def write(self, value: Any) -> None:
        """Give the rows an array's values, of a GPU's at the bus' full speed; they have to lie one after the other."""
        key, offset, _ = self.span
        if JAX.on_gpu and JAX.holds(value) and value.dtype == self.dtype:
            JAX.staging.write(self._rank, key, offset, value)
        else:
            rows = self.selected
            target = self._array[rows.start : rows.stop] if isinstance(rows, range) else self.array
            target[...] = cast(value, self.dtype, "value")

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return as_numpy(self.array if self.selected is None else take(self._array, self.selected), dtype, copy)

    def __repr__(self) -> str:
        return f"<synkhronos.LocalRows: {self.dtype}, shape {self.shape}>"


class LocalFunction:
    """A compiled function that a rank calls for itself; what a program gets for a `synkhronos.Function`.

    Its updates change this rank's own shared variables; nothing is scattered or reduced.
    """

    def __init__(self, rank: Rank, task: Task, program: Program):
        self._rank, self._task, self._program = rank, task, program

    def __repr__(self) -> str:
        return f"<synkhronos.LocalFunction {self._program.name}>"

    def __call__(self, *inputs: Any) -> Any:
        """Run on this rank, and return its outputs.

        Parameters
        ----------
        *inputs : LocalRows or array_like
            In the order of ``inputs`` and then ``bcast_inputs``.

        Returns
        -------
        ndarray, or list of ndarray
            A list unless there is one output.
        """
        values = self.read(self.launch(*inputs))
        return values[0] if len(values) == 1 else values

    def launch(self, *inputs: Any) -> list[Any]:
        """Run on this rank, and return the outputs, which may be there later: `read` waits for them."""
        self._task.progress()
        return self._run(self._program.compile(PLAIN).runner, inputs)

    def launch_many(self, times: int, *inputs: Any) -> list[Any] | None:
        """Run many times, each time with the next of as many equal parts of the inputs' rows, in one launch.

        Returns
        -------
        list, or None
            Each output as often as it was computed, one output after the other; None where there is no such launch:
            where functions are not compiled by XLA, or have outputs that are no numbers.
        """
        self._task.progress()
        repeated = self._program.compile(PLAIN).runner.repeated(times)
        return None if repeated is None else self._run(repeated, inputs)

    @property
    def most_at_once(self) -> int:
        """How many times one launch may run it, where there is such a launch."""
        return self._program.engine.most_at_once()

    def read(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Return outputs of `launch` as NumPy arrays, once they are computed."""
        return [np.asarray(value) for value in self._program.engine.fetch(values)]

    def _run(self, run: Runner, inputs: Sequence[Any]) -> list[Any]:
        program = self._program
        if len(inputs) != len(program.inputs):
            raise TypeError(f"{program.name} takes {len(program.inputs)} inputs, got {len(inputs)}")
        devices, values = program.input_devices_for(run), []
        for position, (entry, device, value) in enumerate(zip(program.inputs, devices, inputs, strict=True)):
            kind = entry.variable.type
            if isinstance(value, LocalRows) and value.dtype == kind.dtype and value.ndim == kind.ndim:
                taken = device.input(
                    self._rank, program.buffers, position, value.location, value.checked(), entry.mutable
                )
            else:
                value = np.asarray(value) if isinstance(value, LocalRows) else value
                taken = program.library.filter(kind, value, entry.strict, entry.allow_downcast)
                taken = taken if device is HOST else device.from_host(taken)
            values.append(taken)
        return run(*values)
