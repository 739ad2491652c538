"""Calls that cannot be closed: taken out whole, whoever rejects them, and everything else closes."""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import event

from pin_jobs.database import DatabaseRefused
from pin_jobs.messenger.batch import RunLockBusy
from pin_jobs.messenger.calls import RETRY_DELAYS
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.sensors import look_at_calls
from pin_jobs_tests.factories import Messenger, a_ringing_call, an_answered_call

# How a host may reject one call; {id} is the call's. What the batch does is the same for all.
TRIGGER = (
    "CREATE FUNCTION public.reject() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF {condition} THEN {action} "
    "END IF; RETURN NEW; END $$;"
    "CREATE {kind} TRIGGER reject {when} ON messenger.{table} {deferred} FOR EACH ROW EXECUTE FUNCTION public.reject()"
)
OF_THE_CALL = "NEW.id = ANY (CAST(ARRAY{ids} AS uuid[]))"
OF_THE_ROW = "CAST(NEW.payload->>'callId' AS uuid) = ANY (CAST(ARRAY{ids} AS uuid[]))"
DEFERRED = "DEFERRABLE INITIALLY DEFERRED"


def trigger(table: str, action: str, *, deferred: bool = False) -> str:
    is_call = table == "call_sessions"
    return TRIGGER.format(
        condition=OF_THE_CALL if is_call else OF_THE_ROW,
        action=action,
        kind="CONSTRAINT" if deferred else "",
        when=("AFTER " if deferred else "BEFORE ") + ("UPDATE" if is_call else "INSERT"),
        table=table,
        deferred=DEFERRED if deferred else "",
    )


def raising(sqlstate: str) -> str:
    return f"RAISE EXCEPTION USING ERRCODE = '{sqlstate}', MESSAGE = 'not this one';"


REJECTIONS = {
    "a constraint on the call": "ALTER TABLE messenger.call_sessions ADD CHECK "
    "(status IN ('Ringing', 'Answered') OR id <> ALL (CAST(ARRAY{ids} AS uuid[])))",
    "a trigger on the call": trigger("call_sessions", "RAISE EXCEPTION 'not this one';"),
    "a trigger on the call with another code": trigger("call_sessions", raising("22023")),
    "a trigger that swallows the update": trigger("call_sessions", "RETURN NULL;"),
    "a deferred constraint on the call": trigger("call_sessions", raising("23514"), deferred=True),
    "a constraint on the outbox row": "ALTER TABLE messenger.realtime_outbox ADD CHECK "
    "(CAST(payload->>'callId' AS uuid) <> ALL (CAST(ARRAY{ids} AS uuid[])))",
    "a trigger on the outbox row": trigger("realtime_outbox", "RAISE EXCEPTION 'not this one';"),
    "a view's check option": trigger("realtime_outbox", raising("44000")),
    "a trigger that swallows the outbox row": trigger("realtime_outbox", "RETURN NULL;"),
    "a deferred constraint on the outbox row": trigger("realtime_outbox", raising("23503"), deferred=True),
}


def reject(messenger: Messenger, how: str, calls) -> None:
    ids = "[" + ", ".join(f"'{call.id}'" for call in calls) + "]"
    statements = REJECTIONS[how].replace("{ids}", ids)
    function, _, rest = statements.partition("END $$;")
    for statement in [f"{function}END $$", rest] if rest else [statements]:
        messenger.run(statement)


def a_batch_of(messenger: Messenger, count: int, *, first: str = "600s"):
    """Due calls of both phases by turns, the oldest first."""
    age = int(first.removesuffix("s"))
    return messenger.add(
        *(
            an_answered_call(f"{9000 - i}s", "3h") if i % 2 else a_ringing_call(f"{age + count - i}s")
            for i in range(count)
        )
    )


def assert_closed_once(messenger: Messenger, calls) -> None:
    told = Counter(row["payload"]["callId"] for row in messenger.outbox())
    for call in calls:
        assert messenger.status(call) == {"Ringing": "Missed", "Answered": "Failed"}[call.status]
        assert told[str(call.id)] == 1
    assert len(told) == len(calls)


@pytest.mark.parametrize("how", REJECTIONS)
@pytest.mark.parametrize("which", ["one", "the first and the last", "all"])
def test_whoever_rejects_a_call_the_others_close(messenger, reap, how, which):
    calls = a_batch_of(messenger, 9)
    poison = {"one": calls[4:5], "the first and the last": [calls[0], calls[-1]], "all": calls}[which]
    reject(messenger, how, poison)
    before = [messenger.call(call) for call in poison]

    result = reap()

    assert result.poisoned == len(poison)
    assert [messenger.call(call) for call in poison] == before
    assert_closed_once(messenger, [call for call in calls if call not in poison])
    kept = {row["call_id"]: row for row in messenger.rows("SELECT * FROM pin_jobs.quarantined_calls")}
    assert kept.keys() == {call.id for call in poison}
    for call in poison:
        row = kept[call.id]
        assert row["phase"] == {"Ringing": "ring_timeout", "Answered": "stale_answered"}[call.status]
        assert (row["attempts"], row["first_seen"], row["next_attempt"]) == (1, result.as_of, result.as_of)
        assert (
            "not this one" in row["last_error"] or "constraint" in row["last_error"] or "trigger" in row["last_error"]
        )


def test_calls_rejected_in_several_ways_at_once_are_all_taken_out(messenger, reap):
    calls = a_batch_of(messenger, 40)
    (guarded,) = messenger.add(a_ringing_call("9min", end_reason="Hangup"))
    reject(messenger, "a constraint on the call", calls[:2])
    reject(messenger, "a constraint on the outbox row", calls[7:9])
    reject(messenger, "a trigger that swallows the outbox row", calls[20:21])

    assert reap().poisoned == 6
    poison = [*calls[:2], *calls[7:9], calls[20]]
    assert_closed_once(messenger, [call for call in calls if call not in poison])
    assert messenger.status(guarded) == "Ringing"


def test_a_constraint_that_wants_call_and_outbox_row_together_takes_nobody_for_poison(messenger, reap):
    calls = a_batch_of(messenger, 6)
    messenger.run(
        "CREATE FUNCTION public.told() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NOT EXISTS (SELECT FROM "
        "messenger.realtime_outbox WHERE payload->>'callId' = CAST(NEW.id AS text)) THEN "
        "RAISE EXCEPTION 'nobody was told'; END IF; RETURN NULL; END $$"
    )
    messenger.run("ALTER FUNCTION public.told() SECURITY DEFINER")
    messenger.run(
        f"CREATE CONSTRAINT TRIGGER told AFTER UPDATE ON messenger.call_sessions {DEFERRED} "
        "FOR EACH ROW EXECUTE FUNCTION public.told()"
    )
    # Another one is poison, so that the batch is written in parts.
    reject(messenger, "a constraint on the outbox row", calls[:1])

    assert reap().poisoned == 1
    assert_closed_once(messenger, calls[1:])


@pytest.mark.parametrize("table", ["call_sessions", "realtime_outbox"])
@pytest.mark.parametrize("sqlstate", ["42501", "42P01", "40001", "40P01", "55P03", "53100", "XX001", "P0002", "P0004"])
def test_what_is_no_fault_of_a_call_fails_the_whole_batch(messenger, new_batch, table, sqlstate):
    calls = a_batch_of(messenger, 5)
    REJECTIONS["for this test"] = trigger(table, raising(sqlstate))
    reject(messenger, "for this test", calls[2:3])
    batch = new_batch()

    with pytest.raises(DatabaseRefused, match=sqlstate):
        batch.write_outbox(batch.transition(batch.claim()))

    batch.close()
    assert messenger.statuses() == {"Ringing": 3, "Answered": 2}
    assert messenger.outbox() == messenger.rows("SELECT * FROM pin_jobs.quarantined_calls") == []
    assert messenger.locks() == []


def count_statements(engine) -> list[str]:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    return statements


def test_isolation_costs_as_many_statements_as_there_is_poison_times_the_log_of_the_batch(
    messenger, reap, measured: Callable[..., None]
):
    figures = {}
    for poison, size in ((0, 5), (0, 200), (1, 200), (10, 200), (1, 2000), (10, 2000)):
        messenger.run("TRUNCATE messenger.call_sessions, messenger.realtime_outbox, pin_jobs.quarantined_calls")
        calls = messenger.add(*(a_ringing_call(f"{5000 - i}s") for i in range(size)))
        if poison:
            reject(messenger, "a constraint on the outbox row", calls[:: size // poison][:poison])
        engine = messenger.jobs_engine
        statements = count_statements(engine)

        assert reap(engine=engine, catch_up_batch_size=2000).poisoned == poison

        figures[poison, size] = len(statements)
        if poison:
            messenger.run("ALTER TABLE messenger.realtime_outbox DROP CONSTRAINT realtime_outbox_payload_check")
    measured(
        "statements of a cycle", **{f"{poison} poison of {size}": count for (poison, size), count in figures.items()}
    )
    healthy = figures[0, 200]
    assert figures[0, 5] == healthy
    assert healthy <= 25
    for (poison, size), count in figures.items():
        # Per halving two parts, each of at most eight statements.
        assert count <= healthy + 8 * (2 * poison * math.ceil(math.log2(size)) + 2)


def test_a_retry_that_fails_again_does_not_break_up_the_healthy_calls(messenger, reap):
    calls = messenger.add(*(a_ringing_call(f"{900 - i}s") for i in range(100)))
    reject(messenger, "a trigger on the call", calls[:1])
    reap()
    messenger.add(*(a_ringing_call(f"{500 - i}s") for i in range(100)))
    engine = messenger.jobs_engine
    statements = count_statements(engine)

    result = reap(engine=engine)

    assert (result.missed, result.poisoned) == (100, 1)
    assert sum("UPDATE messenger.call_sessions" in statement for statement in statements) == 2


@pytest.mark.parametrize("batch_size", [1, 200])
def test_healthy_calls_behind_as_much_poison_as_a_batch_takes_close_by_the_next_cycle(messenger, reap, batch_size):
    strict = {"batch_size": batch_size, "catch_up_batch_size": batch_size}
    poison = messenger.add(*(a_ringing_call(f"{2000 - i}s") for i in range(batch_size)))
    healthy = messenger.add(*(a_ringing_call(f"{100 - i}s") for i in range(min(batch_size, 50))))
    reject(messenger, "a constraint on the call", poison)

    assert reap(**strict).poisoned == batch_size
    assert reap(**strict).missed == len(healthy)
    assert messenger.statuses() == {"Ringing": batch_size, "Missed": len(healthy)}


def test_retries_are_at_most_a_tenth_of_a_batch_and_after_the_healthy_ones(messenger, new_batch, reap):
    poison = messenger.add(*(a_ringing_call(f"{2000 - i}s") for i in range(60)))
    reject(messenger, "a constraint on the call", poison)
    reap()
    healthy = messenger.add(*(a_ringing_call(f"{200 - i}s") for i in range(35)))
    claim = new_batch(batch_size=40, catch_up_batch_size=40).claim()

    assert [call.id for call in claim.calls[:35]] == [call.id for call in healthy]
    assert len(claim.calls[35:]) == 4
    assert sum(claim.remaining.values()) == 0
    assert sum(claim.skipped_locked.values()) == 0


def test_a_full_batch_of_healthy_calls_leaves_no_room_for_retries(messenger, new_batch, reap):
    reject(messenger, "a constraint on the call", messenger.add(a_ringing_call("2000s")))
    reap()
    messenger.add(*(a_ringing_call(f"{200 - i}s") for i in range(9)))
    claim = new_batch(batch_size=5, catch_up_batch_size=5).claim()
    assert (len(claim.calls), len(claim.attempts), sum(claim.remaining.values())) == (5, 0, 4)


def test_a_batch_full_of_poison_gets_on_within_its_time(messenger, new_batch, monkeypatch):
    calls = messenger.add(*(a_ringing_call(f"{2000 - i}s") for i in range(64)))
    reject(messenger, "a constraint on the call", calls[:60])
    # The worker's clock goes on by a second with every statement: of 400 there is time for a part only.
    moments = iter(range(1_000_000))
    monkeypatch.setattr("pin_jobs.messenger.transaction.time.monotonic", lambda: float(next(moments)) / 10)
    bounds = {"max_run_duration": timedelta(seconds=120), "lock_ttl": timedelta(hours=1)}
    seen = []
    for _ in range(20):
        batch = new_batch(**bounds)
        result = batch.write_outbox(batch.transition(batch.claim()))
        seen.append((result.poisoned, result.remaining))
        if not result.remaining:
            break
    assert len(seen) > 1, "there was time for all at once: this tested nothing"
    assert messenger.value("SELECT count(*) FROM pin_jobs.quarantined_calls") == 60
    assert_closed_once(messenger, calls[60:])


def test_of_many_workers_one_back_off_holds_for_all(messenger, new_batch, caplog):
    """Ten minutes in which twelve workers come by every five seconds."""
    (poison,) = messenger.add(a_ringing_call("2000s"))
    reject(messenger, "a trigger on the call", [poison])
    options = CallTimeoutReaperOptions()
    attempts = 0
    caplog.set_level(logging.WARNING)
    for _ in range(10 * 60 // 5):
        if look_at_calls(messenger.jobs_engine, options).due:
            outcomes = []

            def work(outcomes=outcomes):
                batch = new_batch()
                claim = batch.claim()
                if not isinstance(claim, RunLockBusy):
                    outcomes.append(batch.write_outbox(batch.transition(claim)).poisoned)

            workers = [threading.Thread(target=work) for _ in range(12)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(30)
            attempts += sum(outcomes)
        # Five seconds pass.
        messenger.run("UPDATE pin_jobs.quarantined_calls SET next_attempt = next_attempt - interval '5 s'")
    # At once perhaps several, one after the other: the first delay is none. Then after 30, 60, 120 and 240 s.
    assert 6 <= attempts <= 8
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == attempts
    assert messenger.value("SELECT attempts FROM pin_jobs.quarantined_calls") == attempts


def test_the_delays_grow_to_fifteen_minutes(messenger, reap):
    reject(messenger, "a trigger on the call", messenger.add(a_ringing_call("2000s")))
    delays = []
    for _ in range(len(RETRY_DELAYS) + 2):
        result = reap()
        (row,) = messenger.rows("SELECT * FROM pin_jobs.quarantined_calls")
        delays.append(row["next_attempt"] - result.as_of)
        messenger.run("UPDATE pin_jobs.quarantined_calls SET next_attempt = clock_timestamp()")
    assert delays == [*RETRY_DELAYS, timedelta(minutes=15), timedelta(minutes=15)]
    assert row["attempts"] == len(delays)
    assert row["first_seen"] < result.as_of
