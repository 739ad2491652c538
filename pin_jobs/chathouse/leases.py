"""The leases of a check: whoever holds an operator's lease checks it, alone, until the lease runs out."""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection, Engine

from pin_jobs.chathouse.dialogs import Operator, due_at, is_reserved
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.transaction import QUERIES, READ_TIMEOUT, WRITE_TIMEOUT, find_operators, transaction
from pin_jobs.errors import PinJobsError

_INTERVAL: Final = 0.5
_BUSY: Final = "somebody else checks it"


class LeaseLost(PinJobsError):
    """A check took longer than its lease; somebody else may be at work for the operator, so nothing is written."""

    def __init__(self, operator_id: str) -> None:
        super().__init__(
            f"the lease of operator {operator_id} ran out; nothing was written, and the next check finds the same chats"
        )


class Leases:
    """The operators that one check holds, by id; nobody else writes for them until they are completed or run out."""

    def __init__(self, engine: Engine, options: PostChatMailOptions, log: logging.Logger) -> None:
        self._engine = engine
        self._options = options
        self._log = log
        self._token = uuid.uuid4()
        self.held: dict[str, Operator] = {}

    def take(
        self, operators: Sequence[str] | None, *, only_due: bool, stopped_too: bool, patience: timedelta
    ) -> Mapping[str, str]:
        """Take the leases of these operators, or of all at work for `None`; why which of them are left out.

        `patience`: how long one that somebody else checks is waited for.
        """
        give_up = time.monotonic() + patience.total_seconds()
        while True:
            left_out = self._try(operators, only_due=only_due, stopped_too=stopped_too)
            busy = [operator for operator, reason in left_out.items() if reason.startswith(_BUSY)]
            if not busy or time.monotonic() >= give_up:
                break
            time.sleep(_INTERVAL)
        for operator, reason in left_out.items():
            self._log.warning("operator %s is left out: %s", operator, reason)
        return left_out

    def locked(self, connection: Connection, operators: Sequence[str]) -> list[str]:
        """Of these operators, those whose lease is still ours; it stays so until the end of the transaction."""
        held = connection.scalars(QUERIES["lock_lease"], {"operators": list(operators), "token": self._token})
        return list(held)

    def complete(self, connection: Connection, operators: Sequence[Operator]) -> None:
        """The checks of these operators end with this transaction, and the next ones are due one interval later."""
        connection.execute(
            QUERIES["complete_checks"],
            {
                "operators": [operator.operator_id for operator in operators],
                "started_at": [operator.started_at for operator in operators],
                "token": self._token,
                "check_interval": self._options.check_interval,
            },
        )

    def let_go(self, operators: Sequence[Operator]) -> None:
        """The same in a transaction of its own."""
        if operators:
            with transaction(self._engine, WRITE_TIMEOUT) as connection:
                self.complete(connection, operators)
            for operator in operators:
                self.held.pop(operator.operator_id, None)

    def give_back(self) -> None:
        """Give back the leases that are still held, as after a failure: the next check is due one interval from now.

        A database that is gone is no error here: a lease runs out by itself.
        """
        try:
            self.let_go(list(self.held.values()))
        except PinJobsError as error:
            self._log.warning("leases are not given back, they run out by themselves: %s", error)
        self.held.clear()

    def _try(self, operators: Sequence[str] | None, *, only_due: bool, stopped_too: bool) -> Mapping[str, str]:
        left_out: dict[str, str] = {}
        wanted: list[Operator] = []
        with transaction(self._engine, READ_TIMEOUT) as connection:
            now, found = find_operators(connection, operators)
            known = {operator.operator_id for operator in found}
            left_out |= {name: "it has no runner" for name in operators or () if name not in known}
            for operator in found:
                if operator.operator_id in self.held:
                    continue
                if reason := self._reason_to_leave_out(operator, now, only_due=only_due, stopped_too=stopped_too):
                    # Nobody asked for those that are merely stopped.
                    if operators is not None or operator.is_running:
                        left_out[operator.operator_id] = reason
                else:
                    wanted.append(operator)
            taken = set(
                connection.scalars(
                    QUERIES["take_leases"],
                    {
                        "operators": [operator.operator_id for operator in wanted],
                        "last_completed": [operator.last_completed for operator in wanted],
                        "token": self._token,
                        "lease_ttl": self._options.lease_ttl,
                    },
                )
            )
        for operator in wanted:
            if operator.operator_id in taken:
                self.held[operator.operator_id] = operator
            else:
                left_out[operator.operator_id] = f"{_BUSY}, and was first"
        return left_out

    def _reason_to_leave_out(
        self, operator: Operator, now: datetime, *, only_due: bool, stopped_too: bool
    ) -> str | None:
        if not operator.is_running and not stopped_too:
            return "its runner has stopped"
        if is_reserved(operator.lease_until, now, self._options.lease_ttl):
            return f"{_BUSY} until {operator.lease_until:%H:%M:%S} at the latest"
        due = due_at(operator, self._options.times, now)
        if only_due and (due is None or due > now):
            return "it was checked in the meantime"
        return None
