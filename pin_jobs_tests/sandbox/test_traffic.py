import random
import threading
import time
from collections import Counter

import pytest
from sqlalchemy import text

from pin_jobs.sandbox.traffic import Fate, Traffic, plan_call, plan_history
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.waiting import wait_for

ENDS_AS = {
    Fate.TALKED: ("Ended", "Hangup"),
    Fate.DECLINED: ("Declined", "Declined"),
    Fate.GIVEN_UP: ("Ended", "Hangup"),
    Fate.FORGOTTEN: ("Ringing", None),
    Fate.VANISHED: ("Answered", None),
}


def test_the_same_seed_plans_the_same_calls() -> None:
    assert plan_call(random.Random(7)) == plan_call(random.Random(7))
    assert plan_history(random.Random(7)) == plan_history(random.Random(7))


def test_about_a_quarter_of_the_calls_is_closed_by_nobody() -> None:
    rng = random.Random(1)
    plans = [plan_call(rng) for _ in range(2000)]
    forgotten = sum(len(plan) == 1 and plan[0].statement == "ring" for plan in plans)
    vanished = sum(plan[0].statement == "vanish" for plan in plans)
    assert 0.22 < forgotten / len(plans) < 0.3
    assert 0.02 < vanished / len(plans) < 0.06


@pytest.mark.parametrize("fate", Fate)
def test_steps_follow_each_other_in_time(fate: Fate) -> None:
    for seed in range(50):
        delays = [step.delay for step in plan_call(random.Random(seed), fate)]
        assert delays == sorted(delays)
        assert delays[0] == 0


@pytest.mark.parametrize("fate", Fate)
def test_every_fate_is_met(messenger: Messenger, fate: Fate) -> None:
    traffic = Traffic(messenger.engine, random.Random(3), speed=200)
    steps = plan_call(random.Random(3), fate)
    traffic.schedule(steps, time.monotonic())
    call = steps[0].parameters["id"]
    query = text("SELECT status, end_reason, duration_seconds FROM messenger.call_sessions WHERE id = :id")

    def as_planned() -> bool:
        with messenger.engine.connect() as connection:
            row = connection.execute(query, {"id": call}).one_or_none()
        return row is not None and (row[0], row[1]) == ENDS_AS[fate] and (row[2] is not None) == (fate is Fate.TALKED)

    thread, stop = run(traffic)
    wait_for(as_planned, 20, fate)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def test_an_empty_table_is_given_a_history_once(messenger: Messenger) -> None:
    for _ in range(2):
        thread, stop = run(Traffic(messenger.engine, random.Random(5), speed=0.001))
        wait_for(lambda: sum(statuses(messenger).values()) >= 55, 10, "the history")
        stop.set()
        thread.join(5)
    counted = statuses(messenger)
    assert 55 <= sum(counted.values()) <= 57
    assert counted["Ringing"] >= 12
    assert counted["Answered"] >= 3


def test_traffic_survives_lost_connections(messenger: Messenger) -> None:
    said: list[str] = []
    thread, stop = run(Traffic(messenger.engine, random.Random(5), speed=20), said)
    wait_for(lambda: sum(statuses(messenger).values()) > 56, 10, "some traffic")
    with messenger.engine.connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
    before = sum(statuses(messenger).values())
    wait_for(lambda: sum(statuses(messenger).values()) > before + 3, 20, "traffic to go on")
    stop.set()
    thread.join(5)
    assert len(said) <= 1


def run(traffic: Traffic, said: list[str] | None = None) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    lines = said if said is not None else []
    thread = threading.Thread(target=traffic.run, args=(stop.is_set, lines.append), daemon=True)
    thread.start()
    return thread, stop


def statuses(messenger: Messenger) -> Counter[str]:
    with messenger.engine.connect() as connection:
        rows = connection.execute(text("SELECT status FROM messenger.call_sessions")).scalars().all()
    return Counter(rows)
