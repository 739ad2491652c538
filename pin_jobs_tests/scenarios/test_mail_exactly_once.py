"""Live checks, backfills, restarts and killed runs, all at once: each paid chat has one task in the end."""

import itertools
import logging
import math
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import pytest
from redis import Redis

from pin_jobs.chathouse.checks import OperatorChecks
from pin_jobs.chathouse.dialog_api import DialogApi, MailLimit, MailLimitAnswer, StageBounds
from pin_jobs.chathouse.look import look_at_operators
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.redis_store import RedisStore
from pin_jobs_tests.chathouse.factories_chathouse import Chathouse
from pin_jobs_tests.waiting import wait_for

LOG = logging.getLogger("pin_jobs_tests")
OPTIONS = PostChatMailOptions()
BOUNDS = StageBounds(concurrency=16, deadline=timedelta(seconds=45))
OPERATORS, PAIRS_OF_EACH = 20, 50
# Of twenty operators, those that the two processes which are killed begin with; the others are left to the rest.
OF_THE_STUCK, OF_THE_BUSY = slice(0, 10), slice(15, 20)
# Twenty take two minutes.
ROUNDS = int(os.environ.get("PIN_JOBS_TEST_ROUNDS", "5"))
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


class SlowDialogApi:
    """Takes a moment to answer, so that others come in between; after `answers` of them it never answers again."""

    def __init__(self, answers: float = math.inf, is_silent: Event | None = None) -> None:
        self._answers = itertools.count()
        self._enough = answers
        self._is_silent = is_silent

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        assert lady_api_id
        assert man_ulid
        if next(self._answers) >= self._enough:
            assert self._is_silent is not None
            self._is_silent.set()
            threading.Event().wait()
        time.sleep(random.random() / 1000)
        return MailLimitAnswer(MailLimit.ALLOWED, "the test says so")


def new_checks(chathouse: Chathouse, valkey_url: str, api: DialogApi | None = None) -> OperatorChecks:
    store = RedisStore(Redis.from_url(valkey_url), LOG)
    return OperatorChecks(
        chathouse.jobs_engine, OPTIONS, api=api or SlowDialogApi(), bounds=BOUNDS, store=store, log=LOG
    )


def check(
    chathouse: Chathouse, valkey_url: str, operators: list[str] | None, api: DialogApi | None = None, **order: object
) -> int:
    """A whole check; how many tasks it created."""
    checks = new_checks(chathouse, valkey_url, api)
    try:
        checked = checks.find_candidates(operators, **order)  # type: ignore[arg-type]  # keyword arguments of the test
        done = checks.create_tasks(checks.check_mail_limits(checked))
        # What another check has taken over is no failure of the chat's.
        assert all("lease" in reason for reason in done.failures.values()), done.failures
        return sum(result.outcome == "created" for result in done.results)
    finally:
        checks.close()


def check_until_stuck(chathouse: Chathouse, valkey_url: str, operators: list[str], is_stuck: Event) -> None:
    """Checks one operator after another, until it waits for ever with the lease of one: not the first, not the last."""
    logging.disable()
    api = SlowDialogApi(random.randrange(PAIRS_OF_EACH, PAIRS_OF_EACH * (len(operators) - 1)), is_stuck)
    for name in operators:
        check(chathouse, valkey_url, [name], api)


def check_for_ever(chathouse: Chathouse, valkey_url: str, operators: list[str], is_ready: Event) -> None:
    logging.disable()
    is_ready.set()
    while True:
        check(chathouse, valkey_url, operators)


@contextmanager
def to_be_killed(
    work: Callable[..., None], chathouse: Chathouse, valkey_url: str, operators: list[str]
) -> Iterator[BaseProcess]:
    """A process that has got to the point that `work` tells of."""
    is_there = PROCESSES.Event()
    process = PROCESSES.Process(target=work, args=(chathouse, valkey_url, operators, is_there), daemon=True)
    process.start()
    try:
        assert is_there.wait(60), "the one that will be killed is not at work"
        yield process
    finally:
        process.kill()
        process.join()


def one_round(chathouse: Chathouse, valkey_url: str, names: list[str]) -> Counter[str]:
    """Everything at once, and a check when the leases of the dead have run out; tasks by who created them."""
    start = threading.Barrier(5)

    def live() -> int:
        start.wait(60)
        return check(chathouse, valkey_url, None)

    def backfill() -> int:
        start.wait(60)
        return sum(check(chathouse, valkey_url, [name], stopped_too=True) for name in random.sample(names, 5))

    def restart() -> int:
        start.wait(60)
        for name in random.sample(names, 5):
            chathouse.start_runner(name)
        return 0

    def kill(*processes: BaseProcess) -> int:
        start.wait(60)
        for process in processes:
            time.sleep(random.random() / 5)
            process.kill()
        return 0

    with (
        to_be_killed(check_until_stuck, chathouse, valkey_url, names[OF_THE_STUCK]) as stuck,
        to_be_killed(check_for_ever, chathouse, valkey_url, names[OF_THE_BUSY]) as busy,
        ThreadPoolExecutor(5) as pool,
    ):
        others = {
            "live": [pool.submit(live), pool.submit(live)],
            "backfill": [pool.submit(backfill)],
            "": [pool.submit(restart), pool.submit(kill, busy, stuck)],
        }
        created = Counter({name: sum(one.result(120) for one in done) for name, done in others.items() if name})
        for done in others[""]:
            done.result(120)
    wait_for(lambda: not chathouse.locks(), 10, "the sessions of the dead to be gone")
    chathouse.run("UPDATE pin_jobs.operator_checks SET lease_until = clock_timestamp() WHERE lease_until IS NOT NULL")
    created["the next check"] = check(chathouse, valkey_url, None)
    return created


@pytest.mark.slow
def test_each_chat_has_one_task_whatever_overlaps_restarts_or_dies(
    chathouse: Chathouse, valkey: Redis, valkey_url: str, measured: Callable[..., None]
) -> None:
    assert valkey.ping()
    names = [chathouse.add_operator(f"operator-{number:02}") for number in range(OPERATORS)]
    dialogs = [dialog for name in names for dialog in chathouse.add_chats(name, PAIRS_OF_EACH, "3h")]
    chathouse.run("DELETE FROM chathouse.chat_activity")
    created: Counter[str] = Counter()

    for number in range(ROUNDS):
        chathouse.run("UPDATE chathouse.operator_tasks SET status = 'closed' WHERE status = 'active'")
        chathouse.add_activities(dialogs, f"{11 + ROUNDS - number}min")
        by_whom = one_round(chathouse, valkey_url, names)
        # Those that were killed did something before, and left something to others.
        assert by_whom["live"] + by_whom["backfill"] > 0
        assert by_whom["the next check"] > 0
        assert len(dialogs) - by_whom.total() > 0
        created += by_whom

    tasks = chathouse.rows(
        "SELECT lady_db_id, man_ulid, event_trigger, count(*) AS tasks FROM chathouse.operator_tasks GROUP BY 1, 2, 3"
    )
    total = len(dialogs) * ROUNDS
    created["the killed"] = total - created.total()
    measured(f"tasks of {total} chats by who created them", **created)
    assert {row["tasks"] for row in tasks} == {1}
    assert len(tasks) == total
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
