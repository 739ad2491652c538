"""The database in which interleavings are tried: what its host does there, and what there is to see."""

import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import text

from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.scenarios.clock import DatabaseClock
from pin_jobs_tests.scenarios.host_commands import ANSWER_CALL, DECLINE_CALL, END_CALL, SIGN_OF_LIFE, command
from pin_jobs_tests.scenarios.reaper_model import Intent, Quarantined, Row, Stored
from pin_jobs_tests.waiting import wait_for

# Each with the statuses in which it finds its call.
COMMANDS: Final = {
    "answer": (ANSWER_CALL, {"Ringing"}),
    "hang up": (END_CALL, {"Ringing", "Answered"}),
    "decline": (DECLINE_CALL, {"Ringing"}),
    "sign of life": (SIGN_OF_LIFE, {"Answered"}),
}

_COLUMNS: Final = [field.name for field in fields(Row)]
_CALLS: Final = f"SELECT {', '.join(_COLUMNS)} FROM messenger.call_sessions"
_ADD: Final = f"""
    INSERT INTO messenger.call_sessions ({", ".join(_COLUMNS)}) VALUES ({", ".join(f":{name}" for name in _COLUMNS)})
"""
_INTENTS: Final = "SELECT id, kind, target_kind, targets, payload FROM messenger.realtime_outbox"
_QUARANTINE: Final = "SELECT call_id, phase, attempts, first_seen, next_attempt FROM pin_jobs.quarantined_calls"
_CYCLES: Final = """
    SELECT run_id, as_of, missed, failed, skipped_locked_ring_timeout, skipped_locked_stale_answered, poisoned,
           partition
      FROM pin_jobs.reaper_cycles
"""
_CORRECT: Final = """
    UPDATE messenger.call_sessions
       SET status = :status, end_reason = NULL, ended_at = NULL, duration_seconds = NULL,
           updated_at = coalesce(answered_at, started_at)
     WHERE id = :id
"""

# A host that rejects single calls, in every way that a database has.
_FAULTS: Final = """
    CREATE TABLE public.faults (call_id uuid PRIMARY KEY, fault text NOT NULL);

    CREATE FUNCTION public.reject() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    DECLARE
      fault text;
    BEGIN
      SELECT faults.fault INTO fault FROM public.faults
       WHERE call_id = CAST(coalesce(to_jsonb(NEW) -> 'payload' ->> 'callId', to_jsonb(NEW) ->> 'id') AS uuid);
      IF fault = TG_ARGV[0] || ' raises' THEN
        RAISE EXCEPTION 'the host does not want this call closed';
      ELSIF fault = TG_ARGV[0] || ' violates' THEN
        RAISE EXCEPTION USING ERRCODE = '23514', MESSAGE = 'the call violates a constraint';
      ELSIF fault = TG_ARGV[0] || ' breaks' THEN
        RAISE EXCEPTION USING ERRCODE = 'XX001', MESSAGE = 'the host is broken';
      ELSIF fault = TG_ARGV[0] || ' swallowed' THEN
        RETURN NULL;
      END IF;
      RETURN NEW;
    END $$;

    CREATE TRIGGER reject BEFORE UPDATE ON messenger.call_sessions
       FOR EACH ROW WHEN (NEW.status IN ('Missed', 'Failed')) EXECUTE FUNCTION public.reject('call');
    CREATE TRIGGER reject BEFORE INSERT ON messenger.realtime_outbox
       FOR EACH ROW EXECUTE FUNCTION public.reject('outbox');
    CREATE CONSTRAINT TRIGGER reject_later AFTER UPDATE ON messenger.call_sessions DEFERRABLE INITIALLY DEFERRED
       FOR EACH ROW WHEN (NEW.status IN ('Missed', 'Failed')) EXECUTE FUNCTION public.reject('call deferred');
    CREATE CONSTRAINT TRIGGER reject_later AFTER INSERT ON messenger.realtime_outbox DEFERRABLE INITIALLY DEFERRED
       FOR EACH ROW EXECUTE FUNCTION public.reject('outbox deferred');
"""


class World:
    """One database for all examples. Its host's `updated_at` may be NULL, and its clock is set by hand."""

    def __init__(self, messenger: Messenger, clock: DatabaseClock) -> None:
        messenger.run(_FAULTS)
        messenger.run("ALTER TABLE messenger.call_sessions ALTER updated_at DROP NOT NULL")
        self.jobs = messenger.jobs_engine
        self._clock = clock
        # One looks, one acts at once, one keeps a command's transaction open, one waits for a batch.
        self._sessions = [messenger.engine.connect() for _ in range(4)]
        self._observer, self._host, self._holder, self._waiter = self._sessions
        self._observer.execution_options(isolation_level="AUTOCOMMIT")
        self._waiter_pid = self._waiter.scalar(text("SELECT pg_backend_pid()"))
        self._waiter.rollback()
        # Where nothing should be locked nobody waits for ever.
        self._host.execute(text("SET lock_timeout = '20s'"))
        self._host.commit()
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        self._thread.shutdown()

    def start_over(self, now: datetime) -> None:
        self._change(
            "TRUNCATE messenger.call_sessions, messenger.realtime_outbox, pin_jobs.reaper_cycles, "
            "pin_jobs.quarantined_calls, public.faults"
        )
        self.set_clock(now)

    def set_clock(self, now: datetime) -> None:
        self._clock.set(now)

    # What the host does

    def add(self, row: Row) -> None:
        self._change(_ADD, **vars(row))

    def act(self, name: str, row: Row) -> bool:
        """At once; whether the call was there for it."""
        return command(self._host, COMMANDS[name][0], row)

    def begin(self, name: str, row: Row) -> None:
        """And keep the transaction, and so the call, until `end`."""
        self._holder.execute(text(COMMANDS[name][0]), {"id": row.id})

    def end(self, *, commits: bool) -> None:
        if commits:
            self._holder.commit()
        else:
            self._holder.rollback()

    def wait_for_a_batch(self, name: str, row: Row) -> Future[bool]:
        """On a call that a batch has: done when the batch lets go of it."""
        done = self._thread.submit(command, self._waiter, COMMANDS[name][0], row)
        blocked = "SELECT WHERE cardinality(pg_blocking_pids(:pid)) > 0"
        wait_for(lambda: self._rows(blocked, pid=self._waiter_pid), timeout=20, what="the host to wait for the batch")
        return done

    def correct(self, call_id: uuid.UUID, status: str) -> None:
        """By hand: a call that is over is active again."""
        self._change(_CORRECT, id=call_id, status=status)

    def mark(self, call_id: uuid.UUID) -> None:
        """An active call gets a mark of one that ended."""
        self._change("UPDATE messenger.call_sessions SET end_reason = 'Hangup' WHERE id = :id", id=call_id)

    def unmark(self, call_id: uuid.UUID) -> None:
        self._change("UPDATE messenger.call_sessions SET end_reason = NULL WHERE id = :id", id=call_id)

    def set_fault(self, call_id: uuid.UUID, fault: str | None) -> None:
        self._change("DELETE FROM public.faults WHERE call_id = :id", id=call_id)
        if fault:
            self._change("INSERT INTO public.faults VALUES (:id, :fault)", id=call_id, fault=fault)

    def kill_session(self, application_name: str) -> bool:
        """End the one session of that name on the server, and wait for its end."""
        killed = self._rows(
            "SELECT pg_terminate_backend(pid, 20000) AS is_gone FROM pg_stat_activity WHERE application_name = :name",
            name=application_name,
        )
        return [row.is_gone for row in killed] == [True]

    # What there is to see

    def call(self, call_id: uuid.UUID) -> Row:
        (row,) = self._rows(f"{_CALLS} WHERE id = :id", id=call_id)
        return Row(*row)

    def stored(self) -> Stored:
        return Stored(
            {row.id: Row(*row) for row in self._rows(_CALLS)},
            {row.id: Intent(row[0], row[1], row[2], tuple(row[3]), row[4]) for row in self._rows(_INTENTS)},
            {(row[0], row[1]): Quarantined(*row[2:]) for row in self._rows(_QUARANTINE)},
            {row[0]: tuple(row[1:]) for row in self._rows(_CYCLES)},
        )

    def free_calls(self) -> set[uuid.UUID]:
        """Those that nobody has locked."""
        return {row.id for row in self._rows("SELECT id FROM messenger.call_sessions FOR UPDATE SKIP LOCKED")}

    def run_locks(self) -> int:
        return len(
            self._rows(
                "SELECT FROM pg_locks WHERE locktype = 'advisory' "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        )

    def _rows(self, sql: str, **parameters: Any) -> Sequence[Any]:
        return self._observer.execute(text(sql), parameters).all()

    def _change(self, sql: str, **parameters: Any) -> None:
        with self._host.begin():
            self._host.execute(text(sql), parameters)
