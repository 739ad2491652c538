"""A large history beside a few active calls: whatever the statistics say, nothing of ours reads the history."""

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

import pytest
from sqlalchemy import Engine, text

from pin_jobs.messenger.batch import Claim, ReapBatch
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.quarantine import list_quarantine
from pin_jobs.messenger.sensors import look_at_calls
from pin_jobs_tests.conftest import JOBS_ROLE
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.histories import FORGET_STATISTICS, NO_ACTIVE_CALLS, QUARANTINE, active_calls, finished_calls
from pin_jobs_tests.statements import Scan, Statement, plan_of, recorded, scans_of
from pin_jobs_tests.waiting import wait_for

ANALYZE: Final = "ANALYZE messenger.call_sessions"
# How the statistics came about, each from the state before it.
STATISTICS: Final[Mapping[str, Sequence[str]]] = {
    "from when there were only active calls": [
        active_calls(answered_every=100),
        ANALYZE,
        finished_calls(200_000),
        NO_ACTIVE_CALLS,
        active_calls(),
        QUARANTINE,
    ],
    "none": [FORGET_STATISTICS],
    "fresh": [ANALYZE],
    "from when no call was active": [NO_ACTIVE_CALLS, ANALYZE, active_calls(), QUARANTINE],
}
LOOKS_AT_ACTIVE_CALLS: Final = {"probe", "find_backlog", "claim_ring_timeout", "claim_stale_answered", "count_due"}


@dataclass(frozen=True)
class Recording:
    """How the statements of the sensor, a cycle, a backfill and a person read calls; and what they really read."""

    reads: Mapping[tuple[str, str, str], Sequence[Scan]]
    rows_read_from_end_to_end: int


@pytest.fixture(scope="module")
def recordings(server: Any, messenger_template: str) -> Iterator[Mapping[str, Recording]]:
    name = server.create(messenger_template)
    messenger = server.messenger(name)
    messenger.run("ALTER TABLE messenger.call_sessions SET (autovacuum_enabled = off)")
    found = {}
    for statistics, way in STATISTICS.items():
        for statement in way:
            messenger.run(statement)
        found[statistics] = _record(messenger)
    yield found
    server.drop(name)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_every_statement_finds_its_calls_through_an_index(recordings: Mapping[str, Recording], statistics: str) -> None:
    reads = recordings[statistics].reads

    assert {name for _, name, _ in reads} > {*LOOKS_AT_ACTIVE_CALLS, "claim_ring_timeout_retries", "list_quarantine"}
    through_the_whole_table = [read for read, scans in reads.items() if any(scan.index is None for scan in scans)]
    assert through_the_whole_table == []
    through_a_whole_index = [
        read
        for read, scans in reads.items()
        if any(scan.condition is None and scan.index != "ix_call_active" for scan in scans)
    ]
    assert through_a_whole_index == []
    past_the_partial_index = [
        read
        for read, scans in reads.items()
        if read[1] in LOOKS_AT_ACTIVE_CALLS and "ix_call_active" not in {scan.index for scan in scans}
    ]
    assert past_the_partial_index == []


@pytest.mark.parametrize("statistics", STATISTICS)
def test_nothing_reads_the_table_from_end_to_end(recordings: Mapping[str, Recording], statistics: str) -> None:
    assert recordings[statistics].rows_read_from_end_to_end == 0


def _record(messenger: Messenger) -> Recording:
    # The day on which most of them began: just after midnight nothing of the new one may be due.
    day = messenger.value(
        "SELECT mode() WITHIN GROUP (ORDER BY CAST(started_at AT TIME ZONE 'UTC' AS date)) "
        "FROM messenger.call_sessions WHERE status = 'Ringing'"
    )
    before = _rows_read_from_end_to_end(messenger)
    options = CallTimeoutReaperOptions()
    engine = messenger.jobs_engine
    with recorded(engine) as of_the_sensor:
        assert look_at_calls(engine, options).due
    with recorded(engine) as of_a_person:
        assert list_quarantine(engine)
    with recorded(engine) as of_a_cycle:
        _run_dry(engine, options, None)
    with recorded(engine) as of_a_backfill:
        _run_dry(engine, options, day)
    # A session hands in its figures when it ends.
    sessions = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND usename = :role"
    wait_for(lambda: not messenger.rows(sessions, role=JOBS_ROLE), 10, "the sessions to end")
    reads = {
        **_reads(messenger, "sensor", of_the_sensor),
        **_reads(messenger, "person", of_a_person),
        **_reads(messenger, "cycle", of_a_cycle),
        **_reads(messenger, "backfill", of_a_backfill),
    }
    return Recording(reads, _rows_read_from_end_to_end(messenger) - before)


def _run_dry(engine: Engine, options: CallTimeoutReaperOptions, day: date | None) -> None:
    """A whole cycle, or a whole backfill, of which nothing stays."""
    log = logging.getLogger("pin_jobs_tests")
    batch = ReapBatch(engine, options, run_id=str(uuid.uuid4()), job_name="plans", log=log, day=day, is_dry_run=True)
    claim = batch.claim()
    assert isinstance(claim, Claim)
    assert claim.calls
    batch.write_outbox(batch.transition(claim))


def _reads(messenger: Messenger, who: str, statements: Sequence[Statement]) -> dict[tuple[str, str, str], list[Scan]]:
    reads: dict[tuple[str, str, str], list[Scan]] = {}
    with messenger.jobs_engine.connect() as connection:
        for statement in statements:
            if "set_config(" in statement.text:
                # What it sets matters to the plans.
                connection.exec_driver_sql(statement.text, statement.parameters)
                if statement.name in ("bound_probe", "bound_session"):
                    assert connection.scalar(text("SHOW jit")) == "off"
            elif "messenger.call_sessions" in statement.text:
                for kind in ("custom", "generic"):
                    plan = plan_of(connection, statement, is_generic=kind == "generic")
                    scans = [scan for scan in scans_of(plan) if scan.table == "call_sessions"]
                    reads.setdefault((who, statement.name, kind), []).extend(scans)
    return reads


def _rows_read_from_end_to_end(messenger: Messenger) -> int:
    rows: int = messenger.value(
        "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relid = 'messenger.call_sessions'::regclass"
    )
    return rows
