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
        """Complete or abort the operation of a failed command, equally on all ranks, without waiting for a peer.

        A collective completes if all ranks have started it, and is aborted otherwise.
        """

    def close(self) -> None:
        """Abort whatever could wait for a peer.  The ranks exit, and their memory is freed, after this call."""

    def has_writes_at_risk(self) -> bool:
        """Whether a variable is undefined, or becomes undefined if a peer exits now."""
        return False


class PendingOperations(list[PendingOperation]):
    """The pending operations of one rank."""

    def has_writes_at_risk(self) -> bool:
        """Whether any operation has writes at risk."""
        return any(operation.has_writes_at_risk() for operation in self)

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
