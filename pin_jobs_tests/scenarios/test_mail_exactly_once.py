"""Live checks, backfills, restarts and killed runs, all at once: each paid chat has one task in the end."""

import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from redis import Redis

from pin_jobs.chathouse.checks import OperatorChecks, look_at_operators
from pin_jobs.chathouse.dialog_api import MailLimit, MailLimitAnswer, StageBounds
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.redis_store import RedisStore
from pin_jobs_tests.chathouse.factories_chathouse import Chathouse
from pin_jobs_tests.waiting import wait_for

LOG = logging.getLogger("pin_jobs_tests")
OPTIONS = PostChatMailOptions()
BOUNDS = StageBounds(concurrency=16, deadline=timedelta(seconds=45))
HELD = "SELECT count(*) FROM pin_jobs.operator_checks WHERE lease_token IS NOT NULL"
OPERATORS, PAIRS_OF_EACH, ROUNDS = 20, 50, 5


class SlowDialogApi:
    """Takes a moment to answer, so that others come in between."""

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        assert lady_api_id
        assert man_ulid
        time.sleep(random.random() / 1000)
        return MailLimitAnswer(MailLimit.ALLOWED, "the test says so")


def new_checks(chathouse: Chathouse, valkey_url: str) -> OperatorChecks:
    store = RedisStore(Redis.from_url(valkey_url), LOG)
    return OperatorChecks(chathouse.jobs_engine, OPTIONS, api=SlowDialogApi(), bounds=BOUNDS, store=store, log=LOG)


def check(chathouse: Chathouse, valkey_url: str, operators: list[str] | None, **order: object) -> int:
    """A whole check; how many tasks it created."""
    checks = new_checks(chathouse, valkey_url)
    try:
        checked = checks.find_candidates(operators, **order)  # type: ignore[arg-type]  # keyword arguments of the test
        done = checks.create_tasks(checks.check_mail_limits(checked))
        # What another check has taken over is no failure of the chat's.
        assert all("lease" in reason for reason in done.failures.values()), done.failures
        return sum(result.outcome == "created" for result in done.results)
    finally:
        checks.close()


def check_for_ever(chathouse: Chathouse, valkey_url: str, operators: list[str]) -> None:
    logging.disable()
    while True:
        check(chathouse, valkey_url, operators)


@pytest.mark.slow
def test_each_chat_has_one_task_whatever_overlaps_restarts_or_dies(
    chathouse: Chathouse, valkey: Redis, valkey_url: str, measured: Callable[..., None]
) -> None:
    assert valkey.ping()
    names = [chathouse.add_operator(f"operator-{number}") for number in range(OPERATORS)]
    dialogs = [dialog for name in names for dialog in chathouse.add_chats(name, PAIRS_OF_EACH, "3h")]
    chathouse.run("DELETE FROM chathouse.chat_activity")
    created: Counter[str] = Counter()
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload([__name__])

    for number in range(ROUNDS):
        chathouse.run("UPDATE chathouse.operator_tasks SET status = 'closed' WHERE status = 'active'")
        chathouse.add_activities(dialogs, f"{11 + ROUNDS - number}min")
        victim = workers.Process(target=check_for_ever, args=(chathouse, valkey_url, names[:10]), daemon=True)
        victim.start()
        wait_for(lambda: chathouse.value(HELD), 60, "the one that will be killed to be at work")
        start = threading.Barrier(5)

        def live(start: threading.Barrier = start) -> int:
            start.wait(60)
            return check(chathouse, valkey_url, None)

        def backfill(start: threading.Barrier = start) -> int:
            start.wait(60)
            chosen = random.sample(names, 5)
            return sum(check(chathouse, valkey_url, [name], stopped_too=True) for name in chosen)

        def restart(start: threading.Barrier = start) -> int:
            start.wait(60)
            for name in random.sample(names, 5):
                chathouse.start_runner(name)
            return 0

        def kill(start: threading.Barrier = start, victim: multiprocessing.process.BaseProcess = victim) -> int:
            start.wait(60)
            time.sleep(random.random() / 5)
            assert victim.pid
            os.kill(victim.pid, signal.SIGKILL)
            return 0

        with ThreadPoolExecutor(5) as pool:
            done = {
                name: pool.submit(work)
                for name, work in (
                    ("live", live),
                    ("another live", live),
                    ("backfill", backfill),
                    ("restart", restart),
                    ("kill", kill),
                )
            }
            created.update({name: future.result(120) for name, future in done.items()})
        victim.join()
        # Time passes: the leases of the dead run out, and the next check comes.
        wait_for(lambda: not chathouse.locks(), 10, "the sessions of the dead to be gone")
        chathouse.run(
            "UPDATE pin_jobs.operator_checks SET lease_until = clock_timestamp() WHERE lease_until IS NOT NULL"
        )
        created["the next check"] += check(chathouse, valkey_url, None)

    tasks = chathouse.rows(
        "SELECT lady_db_id, man_ulid, event_trigger, count(*) AS tasks FROM chathouse.operator_tasks GROUP BY 1, 2, 3"
    )
    total = len(dialogs) * ROUNDS
    created["the killed"] = total - sum(created.values())
    measured(f"tasks of {total} chats by who created them", **created)
    assert {row["tasks"] for row in tasks} == {1}
    assert len(tasks) == total
    assert created["live"] + created["another live"] > 0
    assert created["backfill"] > 0
    assert created["the killed"] + created["the next check"] > 0, "nobody was killed at work: this tested nothing"
    assert valkey.hlen(f"chathouse:operator:{names[0]}:tasks") == PAIRS_OF_EACH


def test_the_sensor_beside_runs_asks_for_none_twice(chathouse: Chathouse, valkey_url: str) -> None:
    names = {chathouse.add_operator(f"operator-{number}") for number in range(30)}
    for name in names:
        chathouse.add_chat(name)
    asked: list[str] = []
    start = threading.Barrier(6)

    def look() -> None:
        start.wait(30)
        store = RedisStore(Redis.from_url(valkey_url), LOG)
        asked.extend(look_at_operators(chathouse.jobs_engine, store, OPTIONS).requested)

    threads = [threading.Thread(target=look) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(asked) == dict.fromkeys(names, 1)


def test_a_run_that_dies_between_its_commit_and_redis_leaves_its_tasks_for_the_next_check_to_show(
    chathouse: Chathouse, valkey: Redis, valkey_url: str
) -> None:
    chathouse.add_chat(chathouse.add_operator("anna"))
    checks = new_checks(chathouse, valkey_url)
    limits = checks.check_mail_limits(checks.find_candidates(None))
    checks._write_tasks(limits.operators[0], limits.of(limits.results[0].outcome))  # noqa: SLF001  # dies after this
    assert valkey.keys("chathouse:operator:*") == []
    assert len(chathouse.tasks()) == 1

    assert check(chathouse, valkey_url, None, wait_for_lease=timedelta(seconds=1)) == 0

    assert len(chathouse.tasks()) == 1
    assert valkey.hlen("chathouse:operator:anna:tasks") == 1
