"""Operations that may outlast the command that starts them."""

from __future__ import annotations

import logging

_log = logging.getLogger("synkhronos")


class PendingOperation:
    """An operation that may outlast the command that starts it.

    Examples are a collective on GPUs for which no rank has waited, and outputs that have not been read yet.  The
    methods of this class do nothing; a subclass overrides the ones that apply.
    """

    def finish(self) -> None:
        """Wait for completion.  Called in the master, while the workers still run, before an orderly end."""

    def resolve_failed_command(self, command_number: int) -> None:
        """Bring what a failed command has started to the same end on all ranks.

        Nothing of it may wait for a peer forever.  If all ranks have started a collective, it completes on all of them;
        otherwise it is aborted.
        """

    def close(self) -> None:
        """Release everything that could wait for a peer: the ranks end, and memory is freed after this call."""

    def would_lose_writes(self) -> bool:
        """Whether an end of the peers would leave variables undefined, or has left them so."""
        return False


class PendingOperations(list[PendingOperation]):
    """The pending operations of one rank."""

    def would_lose_writes(self) -> bool:
        """Whether an end of the peers would leave variables undefined, or has left them so."""
        return any(operation.would_lose_writes() for operation in self)

    def resolve_failed_command(self, command_number: int) -> None:
        """Call `PendingOperation.resolve_failed_command` of all operations."""
        for operation in self:
            try:
                operation.resolve_failed_command(command_number)
            except Exception as error:
                _log.warning("an operation of a failed command could not be ended: %s", error)

    def close(self) -> None:
        """Close and remove all operations before the ranks exit."""
        while self:
            try:
                self.pop().close()
            except Exception as error:
                _log.warning("a pending operation of the ranks could not be closed: %s", error)
