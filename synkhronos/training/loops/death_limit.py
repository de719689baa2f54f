"""Limits of ``on_death="continue"``: the deaths that end a run, and the rank that is left out."""

from __future__ import annotations

#: Number of deaths that are allowed since the last copy of the state.  The steps since then may be the cause of deaths.
MAX_DEATHS_SINCE_COPY = 3
#: Number of failed starts of a rank in a row after which the rank is left out.
MAX_FAILED_STARTS = 2


class DeathLimit:
    """Counts the deaths of processes, and compares the counts with their limits."""

    def __init__(self, max_deaths: int):
        self.max_deaths, self.n_deaths = max_deaths, 0
        self._n_deaths_since_copy = self._n_failed_starts = 0
        self._last_rank = -1

    def record_death(self, rank: int, is_failed_start: bool = False) -> str | None:
        """Record the death of a rank.  Return a description of the limit that is exceeded, or None."""
        is_second_try = False
        if is_failed_start:
            is_second_try = rank == self._last_rank
            self._n_failed_starts = self._n_failed_starts + 1 if is_second_try else 1
        else:
            self._n_failed_starts = 0
        self._last_rank = rank
        self.n_deaths += 1
        if not is_second_try:  # a second try of a device is not a fault of the steps
            self._n_deaths_since_copy += 1
        if self.n_deaths > self.max_deaths:
            return f"on_death='continue': {self.n_deaths} deaths exceed max_deaths={self.max_deaths}"
        if self._n_deaths_since_copy > MAX_DEATHS_SINCE_COPY:
            deaths = f"{self._n_deaths_since_copy} deaths since the last copy of the state"
            return f"on_death='continue': {deaths} exceed the limit of {MAX_DEATHS_SINCE_COPY}"
        return None

    @property
    def is_rank_unusable(self) -> bool:
        """Whether the rank that died last has failed to start too often, so that it is left out."""
        return self._n_failed_starts >= MAX_FAILED_STARTS

    def reset_counts_since_copy(self) -> None:
        """Reset all counts but the total, after a new copy of the state, or after a rank was left out."""
        self._n_deaths_since_copy = self._n_failed_starts = 0
