from datetime import timedelta

from redis import Redis

from pin_jobs_tests.chathouse.factories_chathouse import Chathouse


def test_what_the_factories_add_is_there(chathouse: Chathouse) -> None:
    operator = chathouse.add_operator(started="1h", stopped="1min", ladies=2)
    dialog = chathouse.add_dialog(chathouse.add_lady(operator))
    moment = chathouse.add_activity(dialog, "11min")
    chathouse.add_mail(dialog, at=moment + timedelta(microseconds=1))
    task = chathouse.add_task(dialog, event_at=moment, event_trigger="x")
    chathouse.close_task(task)
    chathouse.add_chats(operator, 3)

    assert [row["id"] for row in chathouse.tasks(dialog)] == [task]
    assert chathouse.tasks(dialog)[0]["status"] == "closed"
    counts = {
        name: chathouse.value(f"SELECT count(*) FROM chathouse.{name}")
        for name in ("operator_runners", "ladies", "dialogs", "chat_activity", "inmails", "operator_tasks")
    }
    assert counts == {
        "operator_runners": 1,
        "ladies": 4,
        "dialogs": 4,
        "chat_activity": 4,
        "inmails": 1,
        "operator_tasks": 1,
    }


def test_a_valkey_is_empty_for_every_test(valkey: Redis) -> None:
    assert valkey.keys() == []
    valkey.set("left", "behind")


test_and_for_the_next_one = test_a_valkey_is_empty_for_every_test
