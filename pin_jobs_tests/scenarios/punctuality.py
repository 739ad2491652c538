"""How late calls are closed, seen from another session, with every option at its default."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from pin_jobs_tests.deployment import Deployment
from pin_jobs_tests.factories import StoredCall
from pin_jobs_tests.waiting import wait_for

RING_TIMEOUT, STALE_ANSWERED_TIMEOUT, POLLING_INTERVAL = timedelta(seconds=45), timedelta(hours=2), 15.0


def deadline_of(host: Deployment, call: StoredCall) -> datetime:
    stored = host.messenger.call(call)
    if stored["status"] == "Ringing":
        return stored["started_at"] + RING_TIMEOUT
    return stored["updated_at"] + STALE_ANSWERED_TIMEOUT


def seconds_late(
    host: Deployment,
    calls: Sequence[StoredCall],
    timeout: float,
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[float]:
    """Wait until all of these calls are closed; per call how long after its deadline that was.

    `meanwhile` is called again and again while waiting.
    """
    deadlines = {call.id: deadline_of(host, call) for call in calls}
    closed = _watch_until_closed(host, calls, timeout, meanwhile)
    return [(closed[id_] - deadline).total_seconds() for id_, deadline in deadlines.items()]


def _watch_until_closed(
    host: Deployment, calls: Sequence[StoredCall], timeout: float, meanwhile: Callable[[], object]
) -> Mapping[uuid.UUID, datetime]:
    """Per call the moment, on the database's clock, at which another session first saw it closed."""
    open_calls = {str(call.id) for call in calls}
    closed: dict[uuid.UUID, datetime] = {}

    def look() -> bool:
        meanwhile()
        for row in host.messenger.rows(
            "SELECT id, clock_timestamp() AS seen FROM messenger.call_sessions "
            "WHERE status IN ('Missed', 'Failed') AND id = ANY (CAST(:ids AS uuid[]))",
            ids=list(open_calls),
        ):
            closed[row["id"]] = row["seen"]
            open_calls.discard(str(row["id"]))
        return not open_calls

    wait_for(look, timeout, "all calls to be closed")
    return closed
