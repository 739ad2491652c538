"""The post-chat mail over time: chats that go on, and runners with a long history behind them."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from redis import Redis

from pin_jobs.chathouse.checks import Checked, OperatorChecks
from pin_jobs.chathouse.dialog_api import MailLimit, MailLimitAnswer, StageBounds
from pin_jobs.chathouse.dialogs import Outcome
from pin_jobs.chathouse.look import look_at_operators
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.redis_store import RedisStore
from pin_jobs_tests.chathouse.factories_chathouse import Chathouse
from pin_jobs_tests.scenarios.clock import DatabaseClock
from pin_jobs_tests.waiting import wait_for

Check = Callable[[], Checked]
LOG = logging.getLogger("pin_jobs_tests")
OPTIONS = PostChatMailOptions()
BOUNDS = StageBounds(concurrency=16, deadline=timedelta(seconds=45))
MINUTE = timedelta(minutes=1)
# Two keys each. Half a million take too long for every day.
CLOSED_TASKS = int(os.environ.get("PIN_JOBS_TEST_HISTORY", "20000"))
# Tasks of an operator over the last two months, all of them closed, of one lady and as many men.
ADD_HISTORY = """
    INSERT INTO chathouse.operator_tasks (id, kind, module, operator_id, lady_db_id, man_ulid, event_at, event_trigger,
                                          status, created_at, closed_at)
    SELECT gen_random_uuid(), 'NeedToWriteMailTask', 'postChatMail', :operator, :lady, lpad(i::text, 26, '0'), at,
           'trigger ' || i, 'closed', at, at
      FROM generate_series(1, :count) AS i, LATERAL (SELECT now() - i * interval '60 days' / :count AS at) AS moment
"""


class AlwaysAllowed:
    """A dialog API with no end of limits."""

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        return MailLimitAnswer(MailLimit.ALLOWED, f"the test says so for {lady_api_id} and {man_ulid}")


@pytest.fixture
def store(valkey: Redis, valkey_url: str) -> Iterator[RedisStore]:
    assert valkey.ping()
    with Redis.from_url(valkey_url) as client:
        yield RedisStore(client, LOG)


@pytest.fixture
def check(chathouse: Chathouse, store: RedisStore) -> Check:
    """A whole check of all operators, due or not."""

    def run() -> Checked:
        checks = OperatorChecks(
            chathouse.jobs_engine, OPTIONS, api=AlwaysAllowed(), bounds=BOUNDS, store=store, log=LOG
        )
        try:
            return checks.create_tasks(checks.check_mail_limits(checks.find_candidates(None)))
        finally:
            checks.close()

    return run


def test_a_pair_that_chats_every_five_minutes_has_one_task_after_ten_minutes_of_silence(
    chathouse: Chathouse, check: Check
) -> None:
    dialog = chathouse.add_dialog(chathouse.add_lady(chathouse.add_operator()))
    clock = DatabaseClock(chathouse)
    begun = clock.now
    last = begun + 60 * MINUTE

    for step in range(13):
        clock.set(begun + 5 * step * MINUTE)
        chathouse.add_activity(dialog, "0s")
        for _ in range(5):
            assert check().counts() == {Outcome.FRESH: 1}
            clock.set(clock.now + MINUTE)
    clock.set(last + 10 * MINUTE - timedelta(microseconds=1))
    assert check().counts() == {Outcome.FRESH: 1}
    assert chathouse.tasks() == []

    clock.set(last + 10 * MINUTE)
    assert check().counts() == {Outcome.CREATED: 1}
    for later in (11, 20, 80):
        clock.set(last + later * MINUTE)
        assert check().counts() == {}
    (task,) = chathouse.tasks()
    assert task["event_at"] == last


def test_nothing_is_created_before_the_history_is_read_and_a_look_does_not_wait_for_it(
    chathouse: Chathouse, check: Check, store: RedisStore
) -> None:
    operator = chathouse.add_operator("anna")
    lady = chathouse.add_lady(operator)
    chathouse.run(ADD_HISTORY, operator=operator, lady=lady.db_id, count=1000)
    dialog = chathouse.add_chat(operator, lady=lady)
    chathouse.add_chat(chathouse.add_operator("berta"))
    key = f"{lady.db_id}_{'7'.rjust(26, '0')}_trigger 7"
    in_the_way = "INSERT INTO pin_jobs.closed_tasks (key, event_at, reason) VALUES (:key, now(), 'task')"

    with ThreadPoolExecutor(1) as pool:
        with chathouse.holding(in_the_way, key=key):
            checking = pool.submit(check)
            wait_for(lambda: chathouse.value(WAITS_IN_RESTORE), 30, "the reading of the history to wait")
            look = look_at_operators(chathouse.jobs_engine, store, OPTIONS)
            assert (look.requested, look.checked_off) == ((), ())
            failed = checking.result(60)
        # The other operator's work is done.
        assert failed.counts() == {Outcome.CREATED: 1}
        assert list(failed.failures) == [operator]
        assert failed.failures[operator].startswith("its history could not be read")
    assert chathouse.tasks(dialog) == []
    assert chathouse.value("SELECT count(*) FROM pin_jobs.closed_tasks WHERE reason = 'task'") == 0

    assert check().counts(operator) == {Outcome.CREATED: 1}
    assert chathouse.value("SELECT count(*) FROM pin_jobs.closed_tasks WHERE reason = 'task'") == 2000


def test_a_long_history_brings_no_task_back(chathouse: Chathouse, check: Check, measured: Callable[..., None]) -> None:
    operator = chathouse.add_operator()
    lady = chathouse.add_lady(operator)
    chathouse.run(ADD_HISTORY, operator=operator, lady=lady.db_id, count=CLOSED_TASKS)
    # What was dealt with is all there still.
    chathouse.run(
        "INSERT INTO chathouse.dialogs SELECT lady_db_id, man_ulid, true, true, true FROM chathouse.operator_tasks"
    )
    chathouse.run(
        "INSERT INTO chathouse.chat_activity (id, lady_ulid, man_ulid, action, sum, is_free, happened_at) "
        "SELECT row_number() OVER (), :lady, man_ulid, 'send_gift', 1, false, event_at FROM chathouse.operator_tasks",
        lady=lady.ulid,
    )
    dialog = chathouse.add_chat(operator, lady=lady)
    chathouse.run("ANALYZE")

    begun = time.monotonic()
    done = check()
    measured("the first check of a runner", closed_keys=2 * CLOSED_TASKS, seconds=time.monotonic() - begun)

    assert done.failures == {}
    assert done.counts() == {Outcome.CREATED: 1}
    assert len(chathouse.tasks(dialog)) == 1
    assert chathouse.value("SELECT count(*) FROM pin_jobs.closed_tasks WHERE reason = 'task'") == 2 * CLOSED_TASKS


WAITS_IN_RESTORE = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
    "AND query LIKE '%INSERT INTO pin_jobs.closed_tasks%'"
)
