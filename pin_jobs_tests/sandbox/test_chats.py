import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pin_jobs.sandbox.chats import LADIES_OF_OPERATORS, Chats, ChatTraffic, Story, plan_world
from pin_jobs_tests.chathouse.factories_chathouse import Chathouse
from pin_jobs_tests.waiting import wait_for

# What a check looks for, said in the test's own words: the newest paid activity of the pair is older than ten minutes,
# and no mail came since.
WAITING_FOR_A_MAIL = """
    SELECT count(*)
      FROM (SELECT lady.db_id, dialog.man_ulid, max(activity.happened_at) AS newest
              FROM chathouse.ladies AS lady
              JOIN chathouse.dialogs AS dialog ON dialog.lady_db_id = lady.db_id
              JOIN chathouse.chat_activity AS activity
                ON activity.lady_ulid = lady.ulid AND activity.man_ulid = dialog.man_ulid
             WHERE is_active AND is_favorite AND has_mail_limits AND sum > 0 AND NOT is_free
             GROUP BY 1, 2) AS chat
     WHERE newest < now() - interval '10 minutes'
       AND NOT EXISTS (SELECT FROM chathouse.inmails AS mail
                        WHERE mail.lady_db_id = chat.db_id AND mail.man_ulid = chat.man_ulid
                          AND mail.sent_at > newest)
"""


@contextmanager
def playing(traffic: ChatTraffic) -> Iterator[list[str]]:
    stop = threading.Event()
    said: list[str] = []
    thread = threading.Thread(target=traffic.run, args=(stop.is_set, said.append), daemon=True)
    thread.start()
    yield said
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def count(chathouse: Chathouse, table: str, condition: str = "true") -> int:
    return int(chathouse.value(f"SELECT count(*) FROM chathouse.{table} WHERE {condition}"))


def test_the_same_seed_plans_the_same() -> None:
    assert plan_world() == plan_world()
    first, second = (Chats(random.Random(7)) for _ in range(2))
    assert first.beginning(is_empty=True) == second.beginning(is_empty=True)
    assert [first.story() for _ in range(50)] == [second.story() for _ in range(50)]


def test_most_of_what_happens_will_ask_for_a_mail_within_the_next_minute() -> None:
    chats = Chats(random.Random(1))
    ages = [
        step.parameters["age"]
        for _ in range(2000)
        for step in chats.story()
        if step.statement == "chat" and not step.parameters["is_free"]
    ]
    assert 0.4 < sum(550 <= age < 600 for age in ages) / 2000 < 0.7


@pytest.mark.parametrize("kind", Story)
def test_steps_follow_each_other_in_time(kind: Story) -> None:
    chats = Chats(random.Random(3))
    for _ in range(50):
        delays = [step.delay for step in chats.story(kind)]
        assert delays == sorted(delays)
        assert delays[0] == 0


def test_an_empty_chathouse_has_work_at_once_and_a_later_start_brings_more(chathouse: Chathouse) -> None:
    # So slow that nothing happens but the beginning.
    with playing(ChatTraffic(chathouse.engine, random.Random(5), speed=0.01)):
        wait_for(lambda: chathouse.value(WAITING_FOR_A_MAIL) >= 10, 20, "chats that wait for a mail")
    assert count(chathouse, "ladies") == sum(LADIES_OF_OPERATORS.values())
    assert count(chathouse, "dialogs", "is_active AND is_favorite AND has_mail_limits") >= 100
    before = chathouse.value(WAITING_FOR_A_MAIL)
    with playing(ChatTraffic(chathouse.engine, random.Random(6), speed=0.01)):
        wait_for(lambda: chathouse.value(WAITING_FOR_A_MAIL) > before, 20, "more of them")
    assert count(chathouse, "ladies") == sum(LADIES_OF_OPERATORS.values())


def test_every_start_starts_the_runners_anew(chathouse: Chathouse) -> None:
    starts = []
    for seed in (5, 6):
        with playing(ChatTraffic(chathouse.engine, random.Random(seed), speed=50)):
            fresh = f"stopped_at IS NULL AND started_at > '{max(starts, default='-infinity')}'"
            wait_for(lambda: count(chathouse, "operator_runners", fresh) == 5, 20, "five runners")  # noqa: B023  # waited for here
        starts.append(chathouse.value("SELECT max(started_at) FROM chathouse.operator_runners"))


@pytest.fixture
def tell(chathouse: Chathouse) -> Callable[[Story], None]:
    """Plays one story in a chathouse in which nothing else happens."""
    steps, _ = plan_world()

    def play(kind: Story) -> None:
        traffic = ChatTraffic(chathouse.engine, random.Random(2), speed=200)
        story = Chats(random.Random(2)).story(kind)
        traffic.schedule([*steps, *(step for step in story if step.statement != "answer_task")], time.monotonic())
        traffic.play_due(time.monotonic() + 60)

    return play


def test_every_story_leaves_its_trace(chathouse: Chathouse, tell: Callable[[Story], None]) -> None:
    chathouse.run(
        "INSERT INTO chathouse.operator_runners SELECT 'operator-' || n, now() FROM generate_series(1, 5) AS n"
    )
    traces = {
        Story.ENDING_CHAT: (
            "chat_activity",
            "happened_at BETWEEN now() - interval '10 min' AND now() - interval '9 min'",
        ),
        Story.LIVE_CHAT: ("chat_activity", "happened_at > now() - interval '1 min'"),
        Story.FREE_CHAT: ("chat_activity", "is_free AND sum = 0"),
        Story.MAIL: ("inmails", "true"),
        Story.BREAK: ("operator_runners", "started_at > now() - interval '1 min' AND stopped_at IS NULL"),
        Story.OTHER_TASK: ("operator_tasks", "kind = 'UnansweredMailTask' AND status = 'active'"),
    }
    for kind in Story:
        table, condition = traces[kind]
        chathouse.run("TRUNCATE chathouse.chat_activity, chathouse.inmails, chathouse.operator_tasks")
        tell(kind)
        assert count(chathouse, table, condition) >= 1, kind


def test_an_operator_answers_the_oldest_task_once(chathouse: Chathouse) -> None:
    dialogs = chathouse.add_chats(chathouse.add_operator(), 3)
    oldest, other, new = map(chathouse.add_task, dialogs)
    for task, age in ((oldest, "9 min"), (other, "1 min"), (new, "5 s")):
        chathouse.run(
            "UPDATE chathouse.operator_tasks SET created_at = now() - CAST(:age AS interval) WHERE id = :id",
            id=task,
            age=age,
        )
    traffic = ChatTraffic(chathouse.engine, random.Random(2))
    answer = next(
        step for _ in range(100) for step in Chats(random.Random(2)).story() if step.statement == "answer_task"
    )
    for _ in range(2):
        traffic.schedule([answer], 0)
        traffic.play_due(time.monotonic())
    statuses = {task["id"]: task["status"] for task in chathouse.tasks()}
    assert statuses == {oldest: "closed", other: "active", new: "active"}
    assert chathouse.rows("SELECT lady_db_id, man_ulid FROM chathouse.inmails") == [
        {"lady_db_id": dialogs[0].lady_db_id, "man_ulid": dialogs[0].man_ulid}
    ]


def test_it_survives_lost_connections(chathouse: Chathouse) -> None:
    with playing(ChatTraffic(chathouse.engine, random.Random(5), speed=50)) as said:
        wait_for(lambda: count(chathouse, "chat_activity") > 33, 20, "some traffic")
        chathouse.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        before = count(chathouse, "chat_activity")
        wait_for(lambda: count(chathouse, "chat_activity") > before + 3, 20, "traffic to go on")
    assert len(said) <= 1


def test_all_kinds_of_stories_come_about() -> None:
    chats = Chats(random.Random(1))
    statements = Counter(step.statement for _ in range(500) for step in chats.story())
    assert set(statements) == {"chat", "send_mail", "stop_runner", "start_runner", "add_task", "answer_task"}
