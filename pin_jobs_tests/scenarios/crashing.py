"""Worker processes that are killed, frozen or cut off at one point of a cycle, and what must be true afterwards.

Each worker runs the real batch in a process of its own, over a network that stops at the point.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any, Final

from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.errors import PinJobsError
from pin_jobs.messenger import transaction
from pin_jobs.messenger.batch import ReapBatch, RunLockBusy
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs_tests.factories import Messenger, StoredCall
from pin_jobs_tests.proxy import Breakpoint, Side
from pin_jobs_tests.waiting import wait_for

# Frozen workers are waited for: as short as a cycle on a machine that has other things to do allows.
LOCK_TTL: Final = 3.0
_PATIENCE: Final = 30.0
# The session of a killed worker ends within two seconds; the rest is for a busy machine.
_GONE_WITHIN: Final = 10.0
_WORKER: Final = "the-worker"
_ONE_CYCLE_LATER: Final = "one-cycle-later"
_OURS: Final = "datname = current_database() AND application_name LIKE 'call_timeout_reaper%'"


class Fault(Enum):
    """What happens to a worker."""

    KILLED = "SIGKILL"
    FROZEN = "SIGSTOP past lock_ttl"
    CUT_OFF = "a silent network past lock_ttl"


# Killed workers have the usual bounds: longer than anything here lasts, so that nothing ends by them.
OPTIONS: Final = dict.fromkeys(
    (Fault.FROZEN, Fault.CUT_OFF),
    CallTimeoutReaperOptions(lock_ttl=timedelta(seconds=LOCK_TTL), max_run_duration=timedelta(seconds=LOCK_TTL - 0.5)),
) | {Fault.KILLED: CallTimeoutReaperOptions()}


@dataclass(frozen=True)
class Workload:
    """Calls that a cycle closes, calls that it leaves as they are, and what of the host's makes it leave them."""

    name: str
    closed: Sequence[StoredCall]
    left: Sequence[StoredCall]
    host_sql: str = ""


@dataclass(frozen=True)
class Hindrance:
    """Something of the host's that this statement waits for on the server: `sql` holds it, `trap` makes it wait."""

    statement: str
    sql: str = "SELECT pg_advisory_xact_lock(4242)"
    trap: str = ""


@dataclass(frozen=True)
class Point:
    """A point of a cycle: before a request, or after it with its answer unread; or where a hindrance makes it wait.

    `on_its_way`: the request was sent, and the server still gets it.
    """

    statement: str
    request: int | None = None
    side: Side = Side.BEFORE
    on_its_way: bool = False
    hindrance: Hindrance | None = None

    def __str__(self) -> str:
        if self.hindrance:
            return f"inside {self.statement}"
        where = "while sending" if self.on_its_way else self.side.value
        return f"{where} request {self.request}, {self.statement[:60]}"


def _trap(event: str, table: str, *, kind: str = "", when: str = "") -> str:
    return f"""
        CREATE FUNCTION public.hang() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(4242); RETURN NEW; END $$;
        CREATE {kind} TRIGGER hang {event} ON {table} {when} FOR EACH ROW EXECUTE FUNCTION public.hang();
    """


# Whoever only reads the table need not wait.
LOCK_OUT_CLAIMS: Final = "LOCK TABLE messenger.call_sessions IN EXCLUSIVE MODE"
# Of the statements of a cycle those that its host can make take long.
HINDRANCES: Final = (
    Hindrance("SELECT ... FOR UPDATE", sql=LOCK_OUT_CLAIMS),
    Hindrance("UPDATE messenger.call_sessions", trap=_trap("BEFORE UPDATE", "messenger.call_sessions")),
    Hindrance("INSERT INTO messenger.realtime_outbox", trap=_trap("BEFORE INSERT", "messenger.realtime_outbox")),
    Hindrance("INSERT INTO pin_jobs.reaper_cycles", trap=_trap("BEFORE INSERT", "pin_jobs.reaper_cycles")),
    Hindrance(
        "COMMIT",
        trap=_trap("AFTER UPDATE", "messenger.call_sessions", kind="CONSTRAINT", when="DEFERRABLE INITIALLY DEFERRED"),
    ),
)


def points_of(requests: Sequence[str], fault: Fault) -> list[Point]:
    """Every point of a cycle that sends these requests."""
    points = []
    for number, statement in enumerate(requests):
        before = Point(statement, number)
        # Where the request gets lost, or arrives although its sender is gone, matters to the server with COMMIT only.
        decides = statement == "COMMIT"
        if fault is not Fault.CUT_OFF or decides:
            points.append(before)
        if fault is Fault.KILLED and decides:
            points.append(replace(before, on_its_way=True))
        # Nobody answers a good-bye.
        if number < len(requests) - 1:
            points.append(replace(before, side=Side.AFTER))
    return points + [Point(hindrance.statement, hindrance=hindrance) for hindrance in HINDRANCES]


class Workers:
    """Starts workers as forks of a small process that has everything imported: a point costs no interpreter."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pytest", "sqlalchemy.dialects.postgresql.psycopg", __name__])
        self._one_at_a_time = threading.Lock()
        # Workers on their way, and all that does not wait: more would take one another's time, which is bounded.
        self.few_at_once = threading.Semaphore(4)

    @contextmanager
    def start(self, url: str, options: CallTimeoutReaperOptions) -> Iterator["Worker"]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(url, options, theirs), daemon=True)
        with self._one_at_a_time, theirs:
            process.start()
        assert process.pid
        worker = Worker(process.pid, ours)
        try:
            yield worker
        finally:
            worker.kill()
            ours.close()


class Worker:
    """A process that runs one cycle, reports how that ended, and stays until the report is taken."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self._pid = pid
        self._pipe = pipe
        self._is_gone = False

    @property
    def is_done(self) -> bool:
        """Whether its cycle has ended."""
        return self._pipe.poll()

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """Returns when the process is gone."""
        if not self._is_gone:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.report()

    def report(self) -> tuple[str, str]:
        """How its cycle ended and what it said about that, once the process is gone."""
        report = ("killed", "")
        while not self._is_gone:
            assert self._pipe.poll(_PATIENCE), "the worker does not end"
            try:
                report = self._pipe.recv()
                self._pipe.send("taken")
            except (EOFError, OSError):
                self._is_gone = True
        return report


def _work(url: str, options: CallTimeoutReaperOptions, pipe: Connection) -> None:
    # Else how often the server is told what time is left would depend on the time, and so would the points.
    transaction.TOLERANCE = 1.0
    try:
        report = run_cycle(url, options, _WORKER)
    except PinJobsError as error:
        report = "failed", str(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, the test fails with it
        report = "crashed", repr(error)
    pipe.send(report)
    with suppress(EOFError):
        pipe.recv()


def run_cycle(url: str, options: CallTimeoutReaperOptions, run_id: str) -> tuple[str, str]:
    """Run a cycle in this process; how it ended and what it said about that."""
    database = parse_database_url(url, variable="URL of the test")
    engine = connect_to(database, application_name="call_timeout_reaper", answer_timeout=options.lock_ttl)
    # What hundreds of cycles have to say would hide what one of them did wrong.
    silence = logging.Logger("crashing", level=logging.CRITICAL)
    batch = ReapBatch(engine, options, run_id=run_id, job_name="call_timeout_reaper", log=silence)
    try:
        claim = batch.claim()
        if isinstance(claim, RunLockBusy):
            return "busy", str(claim)
        return "committed", str(batch.write_outbox(batch.transition(claim)))
    finally:
        batch.close()


class Crash:
    """One worker in one database, that meets its fault at one point; raises AssertionError where it ends badly."""

    def __init__(self, messenger: Messenger, workers: Workers, workload: Workload, fault: Fault) -> None:
        self._messenger = messenger
        self._workers = workers
        self._workload = workload
        self._fault = fault
        self._options = OPTIONS[fault]

    def rehearse(self) -> list[str]:
        """A cycle to which nothing happens; the requests that it sent."""
        self._fill()
        with Breakpoint(self._messenger.jobs_url) as network, self._start(network) as worker:
            kind, said = worker.report()
            assert kind == "committed", said
            self._check_what_is_closed(by=_WORKER)
            return network.requests

    def at(self, point: Point, *, is_committed: bool) -> None:
        """`is_committed`: whether the worker's cycle is committed by then, or must not be any more."""
        network = Breakpoint(self._messenger.jobs_url, point.request, point.side)
        with ExitStack() as hindrance, network, ExitStack() as end:
            with self._workers.few_at_once:
                self._fill()
                hindrance.enter_context(self._hindered_by(point.hindrance))
                worker = end.enter_context(self._start(network))
                wait_for(lambda: self._is_at(point, network, worker), _PATIENCE, "the worker to come to this point")
            if point.request is not None:
                assert network.requests[point.request] == point.statement, "this cycle is not the rehearsed one"
            self._strike(worker, network, point)
            hindrance.close()
            with self._workers.few_at_once:
                kind, said = run_cycle(self._messenger.jobs_url, CallTimeoutReaperOptions(), _ONE_CYCLE_LATER)
                assert kind == "committed", said
                closed = self._check_what_is_closed(by=_WORKER if is_committed else _ONE_CYCLE_LATER)
            if self._fault is Fault.FROZEN:
                network.go_on()
                worker.thaw()
            kind, said = worker.report()
        if self._fault is not Fault.KILLED:
            assert kind == ("committed" if is_committed else "failed"), f"the worker {kind}: {said}"
            assert "\n" not in said, said
        assert self._state() == closed, "the worker changed something after its time"
        wait_for(lambda: not self._sessions(), _GONE_WITHIN, "all sessions to be gone")
        assert self._messenger.locks() == []

    def _start(self, network: Breakpoint) -> AbstractContextManager[Worker]:
        return self._workers.start(network.url, self._options)

    def _fill(self) -> None:
        self._messenger.run(
            "TRUNCATE messenger.call_sessions, messenger.realtime_outbox, "
            "pin_jobs.reaper_cycles, pin_jobs.quarantined_calls"
        )
        self._messenger.add(*self._workload.closed, *self._workload.left)

    @contextmanager
    def _hindered_by(self, hindrance: Hindrance | None) -> Iterator[None]:
        if hindrance is None:
            yield
            return
        if hindrance.trap:
            self._messenger.run(hindrance.trap)
        try:
            with self._messenger.holding(hindrance.sql):
                yield
        finally:
            self._messenger.run("DROP FUNCTION IF EXISTS public.hang() CASCADE")

    def _is_at(self, point: Point, network: Breakpoint, worker: Worker) -> bool:
        if network.reached.is_set():
            return True
        assert not worker.is_done, f"the worker came past this point: {worker.report()}"
        return bool(point.hindrance) and any(session["wait_event_type"] == "Lock" for session in self._sessions())

    def _strike(self, worker: Worker, network: Breakpoint, point: Point) -> None:
        """Returns when the server must have let go of everything."""
        since = time.monotonic()
        match self._fault:
            case Fault.KILLED:
                worker.kill()
                if point.hindrance is None:
                    network.hang_up(deliver=point.on_its_way)
                wait_for(lambda: not self._sessions(), _GONE_WITHIN, "the worker's session to be gone")
            case Fault.FROZEN:
                worker.freeze()
            case Fault.CUT_OFF:
                network.hold_up()
        if self._fault is not Fault.KILLED:
            wait_for(
                lambda: time.monotonic() > since + LOCK_TTL and not self._holds_locks(),
                LOCK_TTL + _GONE_WITHIN,
                "lock_ttl to pass, and the locks with it",
            )

    def _sessions(self) -> Sequence[Mapping[str, Any]]:
        return self._messenger.rows(f"SELECT pid, wait_event_type FROM pg_stat_activity WHERE {_OURS}")

    def _holds_locks(self) -> bool:
        return bool(
            self._messenger.rows(
                f"SELECT FROM pg_locks WHERE pid IN (SELECT pid FROM pg_stat_activity WHERE {_OURS}) "
                "AND granted AND (locktype IN ('advisory', 'tuple') OR mode LIKE 'Row%Lock')"
            )
        )

    def _state(self) -> Mapping[str, Any]:
        """All calls and outbox rows as they are, and the recorded cycles."""
        (state,) = self._messenger.rows(
            "SELECT (SELECT jsonb_object_agg(id, to_jsonb(call)) FROM messenger.call_sessions AS call) AS calls, "
            "(SELECT jsonb_agg(payload->>'callId' ORDER BY id) FROM messenger.realtime_outbox) AS told, "
            "(SELECT jsonb_object_agg(run_id, to_jsonb(cycle)) FROM pin_jobs.reaper_cycles AS cycle) AS cycles"
        )
        return state

    def _check_what_is_closed(self, *, by: str) -> Mapping[str, Any]:
        state = self._state()
        ends = {"Ringing": "Missed", "Answered": "Failed"}
        expected = {str(call.id): ends[call.status] for call in self._workload.closed}
        expected |= {str(call.id): call.status for call in self._workload.left}
        assert {id_: call["status"] for id_, call in state["calls"].items()} == expected
        closed = sorted(str(call.id) for call in self._workload.closed)
        assert sorted(state["told"] or ()) == closed, "each closed call has one outbox row, and no other call any"
        counts = {run_id: cycle["missed"] + cycle["failed"] for run_id, cycle in state["cycles"].items()}
        assert counts[by] == sum(counts.values()) == len(closed), f"not all are accounted for by {by}: {counts}"
        assert {state["calls"][id_]["ended_at"] for id_ in closed} == {state["cycles"][by]["as_of"]}
        return state
