"""Whatever the messenger, cycles, backfills, crashes and people do in whatever order, the promises hold."""

import logging
import os
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pin_jobs.database import DatabaseRefused, DatabaseUnavailable
from pin_jobs.messenger.batch import Claim, ReapBatch, RunLockBusy, TransitionedBatch
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.quarantine import list_quarantine, release_from_quarantine
from pin_jobs.messenger.sensors import look_at_calls
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.scenarios.clock import DatabaseClock
from pin_jobs_tests.scenarios.interleaving_world import COMMANDS, World
from pin_jobs_tests.scenarios.reaper_model import (
    FAULTS,
    PHASES,
    RING_WINDOW,
    STALE_WINDOW,
    BatchIsLost,
    Cycle,
    Model,
    Row,
    Sizes,
    Stored,
)

# By hand with another number, and then others every time: CONTRIBUTING.md says how.
BY_HAND: Final = os.environ.get("PIN_JOBS_TEST_INTERLEAVINGS")
SETTINGS: Final = settings(
    max_examples=int(BY_HAND or 25),
    stateful_step_count=50,
    derandomize=not BY_HAND,
    print_blob=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
# So that the test cannot become trivial unnoticed: each of these must have happened.
MUST_HAPPEN: Final = (
    "two batches open",
    "live cycle and backfill open",
    "run lock busy",
    "locked call skipped",
    "crash after claim",
    "crash after transition",
    "session killed",
    "waited in vain",
    "waited not in vain",
    "due call held by host",
    "missed",
    "failed",
    "poison found by its call",
    "poison found in the outbox",
    "retry failed",
    "retry waits",
    "retry put off by a clock since set back",
    "retry succeeded",
    "outbox row there already",
    "batch lost",
    "dry run",
    "catch-up",
    "more due than claimed",
    "quarantine released",
    "clock set back",
)

MICROSECOND, SECOND, MINUTE = timedelta(microseconds=1), timedelta(seconds=1), timedelta(minutes=1)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
# Long past, so that no session looks expired by a clock that is set by hand; shortly after a day of backfills began.
START: Final = datetime(2025, 3, 30, 0, 0, 30, tzinfo=UTC)
CALLS: Final = uuid.UUID("b6a8a1f6-6d0c-4a57-9d0e-0f3a5d9c7e11")
TERMINAL: Final = {"Ended", "Declined", "Missed", "Failed"}
MARK: Final = "mark of an ended call"
LOG: Final = logging.getLogger("pin_jobs_tests.interleaving")

# Status, how far past its window, and how long it was talked before the last sign of life.
NewCall = tuple[str, timedelta, timedelta]
LATE: Final = (
    timedelta(0),
    10 * SECOND,
    DAY,
    5 * MINUTE,
    2 * DAY,
    MICROSECOND,
    -MICROSECOND,
    -SECOND,
    -RING_WINDOW,
    -HOUR,
)
NEW_CALLS: Final[list[NewCall]] = [
    *(("Ringing", late, timedelta(0)) for late in LATE for _ in range(3)),
    *(("Answered", late, talked) for late in LATE for talked in (timedelta(0), HOUR, DAY)),
    *(("Answered, updated_at NULL", late, timedelta(0)) for late in LATE),
]
CLOCK_MOVES: Final = (MICROSECOND, SECOND, 30 * SECOND, RING_WINDOW, 15 * MINUTE, STALE_WINDOW, -MINUTE, -HOUR, -HOUR)
# How often a kind of step is tried, among those that are possible.
WEIGHTS: Final = {
    "go_on": 16,
    "whole_cycle": 10,
    "claim": 8,
    "claim_in_vain": 1,
    "crash": 3,
    "calls_begin": 6,
    "host_acts": 5,
    "host_begins": 3,
    "host_ends": 6,
    "host_waits": 4,
    "fault": 5,
    "mend": 4,
    "correct": 4,
    "release": 1,
    "move_clock": 6,
    "look": 1,
}


@dataclass
class OpenBatch:
    """A batch between two of its steps, and how it must go on."""

    batch: ReapBatch
    expected: Cycle
    claim: Claim
    is_dry_run: bool
    transitioned: TransitionedBatch | None = None

    def next_step(self) -> Any:
        if self.transitioned:
            return self.batch.write_outbox(self.transitioned)
        return self.batch.transition(self.claim)


@dataclass
class Waiting:
    """A command of the host that waits for a batch."""

    call_id: uuid.UUID
    name: str
    done: Future[bool]


def possible_steps(machine: "AnyInterleaving") -> st.SearchStrategy[tuple[Any, ...]]:
    steps = {kind: choices for kind, choices in machine.possible_steps().items() if choices}
    kinds = [kind for kind in steps for _ in range(WEIGHTS[kind])]
    return st.sampled_from(kinds).flatmap(lambda kind: st.tuples(st.just(kind), st.sampled_from(steps[kind])))


class AnyInterleaving(RuleBasedStateMachine):
    """One example: steps of everybody, in an order that Hypothesis looks for. Calls go by their number.

    One rule with weights of our own: of rules of its own, Hypothesis switches off half in each example, and few batches
    would ever come to their end.
    """

    def __init__(self, world: World, happened: Counter[str]) -> None:
        super().__init__()
        self.world = world
        self.happened = happened
        self.ids: list[uuid.UUID] = []
        self.batches: dict[str, OpenBatch] = {}
        self.held: uuid.UUID | None = None
        self.waiting: Waiting | None = None
        self.corrected: uuid.UUID | None = None
        self.runs = 0
        self.seen = Stored()

    @initialize(
        sizes=st.sampled_from([Sizes(20, 20, 50), Sizes(2, 4, 3), Sizes(20, 40, 50), Sizes(1, 3, 2)]),
        calls=st.lists(st.sampled_from(NEW_CALLS), min_size=3, max_size=8),
    )
    def start(self, sizes: Sizes, calls: list[NewCall]) -> None:
        self.happened["examples"] += 1
        self.world.start_over(START)
        self.model = Model(START, sizes)
        self.options = CallTimeoutReaperOptions(
            batch_size=sizes.batch,
            catch_up_batch_size=sizes.catch_up,
            backfill_batch_size=sizes.backfill,
            # An example on a busy machine is not to run into them.
            lock_ttl=HOUR,
            max_run_duration=HOUR / 2,
        )
        for call in calls:
            self._add(call)

    @rule(step=st.runner().flatmap(possible_steps))
    def step(self, step: tuple[str, Any]) -> None:
        kind, what = step
        self.happened["steps"] += 1
        getattr(self, kind)(what)

    def possible_steps(self) -> dict[str, Sequence[Any]]:
        """By kind of step, what it can be done with; what is worth more comes more often."""
        free = [number for number, call_id in enumerate(self.ids) if call_id not in self.locked]
        claimed = [number for number, call_id in enumerate(self.ids) if call_id in self.claimed]
        active = [number for number in free if self.row(number).phase]
        return {
            "go_on": sorted(self.batches),
            "whole_cycle": ["live"] if "live" not in self.batches and self._due() else [],
            "claim": self._claims(),
            "claim_in_vain": sorted(self.batches),
            "crash": [(name, how) for name in sorted(self.batches) for how in ("closed", "killed", "killed unawares")],
            "calls_begin": [(call, count) for call in NEW_CALLS for count in (1, 2, 3)],
            "host_acts": [(number, name) for number in active for name in COMMANDS],
            "host_begins": self._commands(active) if not self.held else [],
            "host_ends": ["commits", "rolls back"] if self.held else [],
            "host_waits": self._commands(claimed) if not self.waiting else [],
            "fault": self._faults(),
            "mend": self._faulty(),
            "correct": [(n, status) for n in free if not self.row(n).phase for status in ("Ringing", "Answered")],
            "release": [*self.quarantined, None] if self.quarantined else [],
            # Not while somebody waits, so that the moment of his command is known.
            "move_clock": [by for by in CLOCK_MOVES if self.model.now + by > START - 3 * HOUR]
            if not self.waiting
            else [],
            "look": [None],
        }

    # The calls, their host, and people

    def calls_begin(self, what: tuple[NewCall, int]) -> None:
        for _ in range(what[1]):
            self._add(what[0])

    def host_acts(self, what: tuple[int, str]) -> None:
        row = self.row(what[0])
        assert self.world.act(what[1], row) is (row.status in COMMANDS[what[1]][1])
        self._adopt(row.id)

    def host_begins(self, what: tuple[int, str]) -> None:
        row = self.row(what[0])
        self.world.begin(what[1], row)
        self.held = row.id
        self.happened["due call held by host"] += row.deadline <= self.model.now

    def host_ends(self, how: str) -> None:
        assert self.held
        held, self.held = self.held, None
        self.world.end(commits=how == "commits")
        self._adopt(held)

    def host_waits(self, what: tuple[int, str]) -> None:
        row = self.row(what[0])
        self.waiting = Waiting(row.id, what[1], self.world.wait_for_a_batch(what[1], row))

    def fault(self, what: tuple[int, str]) -> None:
        call_id, fault = self.ids[what[0]], what[1]
        if fault == MARK:
            self.world.mark(call_id)
            self._adopt(call_id)
        else:
            self.world.set_fault(call_id, fault)
            self.model.faults[call_id] = fault

    def mend(self, number: int) -> None:
        self._mend(self.ids[number])

    def correct(self, what: tuple[int, str]) -> None:
        self.corrected = self.ids[what[0]]
        self.world.correct(self.corrected, what[1])
        self._adopt(self.corrected)

    def release(self, call_id: uuid.UUID | None) -> None:
        """`None`: all of them."""
        released = [call_id] if call_id else self.quarantined
        assert {*release_from_quarantine(self.world.jobs, call_id and released)} == {*released}
        for key in [key for key in self.model.stored.quarantine if key[0] in released]:
            del self.model.stored.quarantine[key]
        self.happened["quarantine released"] += 1

    def move_clock(self, by: timedelta) -> None:
        self.model.now += by
        self.world.set_clock(self.model.now)
        self.happened["clock set back"] += by < timedelta(0)

    def look(self, _: None) -> None:
        """As the sensor does, and as people do."""
        probe = look_at_calls(self.world.jobs, self.options)
        calls = self.model.stored.calls
        attempts = [self.model.attempt_at(row) for row in calls.values() if row.phase]
        assert probe.now == self.model.now
        assert probe.due == sum(moment <= self.model.now for moment in attempts)
        assert probe.next_deadline == min(attempts, default=None)
        listed = {(item.call_id, str(item.phase)) for item in list_quarantine(self.world.jobs)}
        assert listed == {key for key in self.model.stored.quarantine if calls[key[0]].phase == key[1]}

    # The reaper

    def claim(self, what: tuple[str | None, bool]) -> None:
        day = date.fromisoformat(what[0]) if what[0] else None
        batch = self._new_batch(day, is_dry_run=what[1])
        expected = self.model.claim(f"run-{self.runs}", day, self.locked)
        claim = batch.claim()
        assert isinstance(claim, Claim)
        self.batches[what[0] or "live"] = OpenBatch(batch, expected, claim, what[1])
        assert claim.as_of == expected.as_of
        assert [call.id for call in claim.calls] == expected.claimed
        assert claim.attempts == expected.attempts
        assert claim.skipped_locked == expected.skipped
        assert claim.remaining == expected.remaining
        assert claim.in_quarantine == expected.waiting
        put_off = [item for (i, _), item in self.model.stored.quarantine.items() if i in expected.attempts]
        self.happened["retry waits"] += any(expected.waiting.values())
        self.happened["retry put off by a clock since set back"] += any(
            i.next_attempt > self.model.now for i in put_off
        )
        self.happened["locked call skipped"] += any(expected.skipped.values())
        self.happened["more due than claimed"] += any(expected.remaining.values())
        self.happened["catch-up"] += day is None and len(expected.claimed) > 2 * self.model.sizes.batch

    def claim_in_vain(self, name: str) -> None:
        busy = self._new_batch(None if name == "live" else date.fromisoformat(name)).claim()
        assert isinstance(busy, RunLockBusy)
        assert busy.application_name == f"reaper/{self.batches[name].expected.run_id}"
        self.happened["run lock busy"] += 1

    def go_on(self, name: str) -> None:
        if self.batches[name].transitioned:
            self._write_outbox(name)
        else:
            self._transition(name)

    def crash(self, what: tuple[str, str]) -> None:
        opened = self.batches[what[0]]
        self.happened[f"crash after {'transition' if opened.transitioned else 'claim'}"] += 1
        if what[1] != "closed":
            assert self.world.kill_session(f"reaper/{opened.expected.run_id}")
            self.happened["session killed"] += 1
        if what[1] == "killed unawares":
            with pytest.raises(DatabaseUnavailable):
                opened.next_step()
        self._is_over(what[0])

    def whole_cycle(self, name: str) -> None:
        self.claim((None, False))
        self._finish(name)

    # What must be true after every step

    @invariant()
    def everything_is_as_it_must_be(self) -> None:
        before, self.seen = self.seen, self.world.stored()
        self._check_promises(before, self.seen)
        assert self.seen == self.model.stored
        assert self.world.free_calls() == {*self.ids} - self.locked
        assert self.world.run_locks() == len(self.batches)
        self.corrected = None
        self.happened["two batches open"] += len(self.batches) > 1
        self.happened["live cycle and backfill open"] += len(self.batches) > 1 and "live" in self.batches

    def _check_promises(self, before: Stored, after: Stored) -> None:
        """What one step may change, whatever the model says."""
        closed = []
        for row in before.calls.values():
            now = after.calls[row.id]
            assert row.status not in TERMINAL or row.id == self.corrected or now == row
            if row.phase and now.status in {"Missed", "Failed"}:
                closed.append(row)
                ((as_of, *_),) = (after.cycles[run_id] for run_id in after.cycles.keys() - before.cycles.keys())
                assert row.deadline <= as_of == now.ended_at
        assert after.outbox == before.outbox | {row.intent.id: row.intent for row in closed}
        counted = [sum(missed + failed for _, missed, failed, *_ in s.cycles.values()) for s in (before, after)]
        assert counted[1] - counted[0] == len(closed)

    def teardown(self) -> None:
        try:
            # Not after an error, which is what there is to say.
            if sys.exc_info()[0] is None:
                self._everything_comes_to_an_end()
        finally:
            for opened in self.batches.values():
                opened.batch.close()
            self.world.end(commits=False)
            if self.waiting:
                self.waiting.done.result(30)

    def _everything_comes_to_an_end(self) -> None:
        """Whatever happened: once all is mended and everybody is gone, a few cycles leave nothing due."""
        self.world.end(commits=False)
        self.held = None
        for name in sorted(self.batches):
            self._finish(name)
            self.everything_is_as_it_must_be()
        for call_id in self.ids:
            self._mend(call_id)
        if self.quarantined:
            self.release(None)
        cycles = max(-(-len(self.model.due(phase)) // self.model.sizes.batch) for phase in PHASES.values())
        for _ in range(cycles + 1):
            self.whole_cycle("live")
            self.everything_is_as_it_must_be()
        assert look_at_calls(self.world.jobs, self.options).due == 0
        assert not self.world.stored().quarantine

    # How it is done

    def row(self, call: int) -> Row:
        return self.model.stored.calls[self.ids[call]]

    @property
    def claimed(self) -> set[uuid.UUID]:
        return {call_id for batch in self.batches.values() for call_id in batch.expected.claimed}

    @property
    def locked(self) -> set[uuid.UUID]:
        return self.claimed | ({self.held} if self.held else set())

    @property
    def quarantined(self) -> list[uuid.UUID]:
        return sorted({call_id for call_id, _ in self.model.stored.quarantine})

    def _commands(self, calls: list[int]) -> list[tuple[int, str]]:
        """What finds its call as it must be."""
        return [(n, name) for n in calls for name, (_, statuses) in COMMANDS.items() if self.row(n).status in statuses]

    def _due(self, day: str | None = None) -> list[Row]:
        rows = [row for row in self.model.stored.calls.values() if row.phase and row.deadline <= self.model.now]
        return [row for row in rows if day in {None, str(row.started_at.date())}]

    def _claims(self) -> list[tuple[str | None, bool]]:
        days = [None, None, None, None, *(str((self.model.now - ago * DAY).date()) for ago in range(3))]
        possible = [(day, False) for day in days if (day or "live") not in self.batches]
        worth_it = [claim for claim in possible if self._due(claim[0])]
        return worth_it + worth_it + [(None, True)] * worth_it.count((None, False)) + possible

    def _faults(self) -> list[tuple[int, str]]:
        """Calls that are due come to grief."""
        due = [number for number, _ in enumerate(self.ids) if self.row(number) in self._due()]
        marks = [(number, MARK) for number in due if self.ids[number] not in self.locked]
        return [*((number, fault) for number in due for fault in FAULTS), *marks]

    def _faulty(self) -> list[int]:
        """Calls with a fault, those that were found out first of all."""
        active = [number for number, _ in enumerate(self.ids) if self.row(number).phase]
        free = [number for number in active if self.ids[number] not in self.locked]
        faulty = [number for number in active if self.ids[number] in self.model.faults]
        faulty += [number for number in free if self.row(number).has_marks_of_an_ended_call]
        return [number for number in faulty if self.ids[number] in self.quarantined] * 4 + faulty

    def _add(self, call: NewCall) -> None:
        status, late, talked = call
        number, is_ringing = len(self.ids), status == "Ringing"
        seen = self.model.now - late - (RING_WINDOW if is_ringing else STALE_WINDOW)
        row = Row(
            id=uuid.uuid5(CALLS, str(number)),
            caller_user_id=uuid.uuid5(CALLS, f"caller of {number}"),
            callee_user_id=uuid.uuid5(CALLS, f"callee of {number}"),
            media_type="Audio" if number % 2 else "Video",
            status="Ringing" if is_ringing else "Answered",
            end_reason=None,
            started_at=seen - talked,
            answered_at=None if is_ringing else seen - talked,
            ended_at=None,
            duration_seconds=None,
            updated_at=None if "NULL" in status else seen,
        )
        self.ids.append(row.id)
        self.world.add(row)
        self.model.stored.calls[row.id] = row

    def _mend(self, call_id: uuid.UUID) -> None:
        self.world.set_fault(call_id, None)
        self.model.faults.pop(call_id, None)
        row = self.model.stored.calls[call_id]
        if row.phase and row.has_marks_of_an_ended_call and call_id not in self.locked:
            self.world.unmark(call_id)
            self._adopt(call_id)

    def _adopt(self, call_id: uuid.UUID) -> None:
        """What the host did to its call is right as it is."""
        self.model.stored.calls[call_id] = self.world.call(call_id)

    def _new_batch(self, day: date | None, *, is_dry_run: bool = False) -> ReapBatch:
        self.runs += 1
        run_id = f"run-{self.runs}"
        return ReapBatch(
            self.world.jobs, self.options, run_id=run_id, job_name="reaper", log=LOG, day=day, is_dry_run=is_dry_run
        )

    def _finish(self, name: str) -> None:
        while name in self.batches:
            self.go_on(name)

    def _transition(self, name: str) -> None:
        opened = self.batches[name]
        try:
            self.model.transition(opened.expected)
        except BatchIsLost:
            self._is_lost(name)
            return
        opened.transitioned = opened.next_step()
        assert {t.before.id for t in opened.transitioned.transitions} == {*opened.expected.closing}
        assert {poison.call.id for poison in opened.transitioned.poisoned} == {*opened.expected.poison}
        self.happened["poison found by its call"] += bool(opened.expected.poison)

    def _write_outbox(self, name: str) -> None:
        opened, expected = self.batches[name], self.batches[name].expected
        poison_before = len(expected.poison)
        try:
            self.model.write_outbox(expected)
        except BatchIsLost:
            self._is_lost(name)
            return
        result = opened.next_step()
        assert {t.before.id for t in result.closed} == {*expected.closing}
        assert {poison.call.id for poison in result.poison} == {*expected.poison}
        assert result.is_committed is not opened.is_dry_run
        self.happened["poison found in the outbox"] += len(expected.poison) > poison_before
        if opened.is_dry_run:
            self.happened["dry run"] += bool(expected.closing)
        else:
            self._note(expected)
            self.model.commit(expected)
        self._is_over(name)

    def _note(self, cycle: Cycle) -> None:
        rows = [self.model.stored.calls[call_id] for call_id in cycle.closing]
        self.happened["missed"] += sum(row.status == "Ringing" for row in rows)
        self.happened["failed"] += sum(row.status == "Answered" for row in rows)
        self.happened["retry failed"] += len(cycle.attempts.keys() & {*cycle.poison})
        self.happened["retry succeeded"] += len(cycle.attempts.keys() & {*cycle.closing})
        self.happened["outbox row there already"] += any(row.intent.id in self.model.stored.outbox for row in rows)

    def _is_lost(self, name: str) -> None:
        with pytest.raises(DatabaseRefused, match="XX001"):
            self.batches[name].next_step()
        self.happened["batch lost"] += 1
        self._is_over(name)

    def _is_over(self, name: str) -> None:
        """The batch lets go of its calls, and whoever waited for one of them goes on."""
        opened = self.batches.pop(name)
        opened.batch.close()
        waiting = self.waiting
        if waiting is None or waiting.call_id not in opened.expected.claimed:
            return
        self.waiting = None
        is_there = self.model.stored.calls[waiting.call_id].status in COMMANDS[waiting.name][1]
        assert waiting.done.result(30) is is_there
        if is_there:
            self._adopt(waiting.call_id)
        self.happened["waited not in vain" if is_there else "waited in vain"] += 1


@pytest.fixture
def world(messenger: Messenger, clock: DatabaseClock) -> Iterator[World]:
    LOG.setLevel(logging.CRITICAL)
    world = World(messenger, clock)
    yield world
    world.close()


@pytest.mark.slow
def test_any_interleaving_keeps_the_promises(world: World, measured: Callable[..., None]) -> None:
    happened: Counter[str] = Counter()

    run_state_machine_as_test(
        lambda: AnyInterleaving(world, happened),  # type: ignore[arg-type]  # a factory will do
        settings=SETTINGS,
    )

    measured("any interleaving", **happened)
    # Who waits how long depends on the machine, and what comes of it on chance: of the rarest some may be missing.
    missing = [what for what in MUST_HAPPEN if not happened[what]]
    assert len(missing) <= 3, missing
