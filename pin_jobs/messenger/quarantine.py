"""The quarantine: calls that could not be closed, what is wrong with them and when they are tried again."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, Engine, RowMapping

from pin_jobs.database import clear_errors
from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.calls import Phase
from pin_jobs.messenger.transaction import DATABASE, QUERIES


class NoQuarantine(PinJobsError):
    """The schema `pin_jobs` of the messenger database is missing or behind."""

    def __init__(self) -> None:
        super().__init__("the messenger database has no quarantine: run `pin-jobs migrate`")


@dataclass(frozen=True, slots=True)
class QuarantinedCall:
    """A call that could not be closed in its phase. Moments are the database's, in UTC."""

    call_id: UUID
    phase: Phase
    attempts: int
    last_error: str
    first_seen: datetime
    next_attempt: datetime
    run_id: str


def list_quarantine(engine: Engine) -> Sequence[QuarantinedCall]:
    """All calls in quarantine, those that are there longest first.

    Raises:
        NoQuarantine, DatabaseUnavailable, DatabaseRefused: the message says what to do.
    """
    with clear_errors(DATABASE), engine.connect() as connection:
        _bound(connection)
        rows = connection.execute(QUERIES["list_quarantine"], {"at_most": None}).mappings().all()
        return [quarantined_call(row) for row in rows]


def release_from_quarantine(engine: Engine, call_ids: Sequence[UUID] | None) -> Sequence[UUID]:
    """Let these calls, or all for `None`, be claimed by the next cycle like any other; return those that were there.

    Raises:
        NoQuarantine, DatabaseUnavailable, DatabaseRefused: nothing was released.
    """
    with clear_errors(DATABASE), engine.begin() as connection:
        _bound(connection)
        if call_ids is None:
            return connection.scalars(QUERIES["release_all_from_quarantine"]).all()
        return connection.scalars(QUERIES["release_from_quarantine"], {"ids": list(call_ids)}).all()


def quarantined_call(row: RowMapping) -> QuarantinedCall:
    """A row of `pin_jobs.quarantined_calls`."""
    return QuarantinedCall(**{**row, "phase": Phase(row["phase"])})


def _bound(connection: Connection) -> None:
    if not connection.execute(QUERIES["bound_probe"], {"timeout": "10000"}).one().has_schema:
        raise NoQuarantine
