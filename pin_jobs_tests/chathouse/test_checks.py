"""A check, on a real database, a real Valkey, and an adapter for the dialog API as a host would write one."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from redis import Redis

from pin_jobs.chathouse.checks import OperatorChecks
from pin_jobs.chathouse.dialog_api import MailLimit, MailLimitAnswer, StageBounds
from pin_jobs.chathouse.dialogs import PAID_ACTIONS, Outcome
from pin_jobs.chathouse.look import look_at_operators
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.redis_store import RedisStore

LOG = logging.getLogger("pin_jobs_tests")
BOUNDS = StageBounds(concurrency=16, deadline=timedelta(seconds=45))


@dataclass
class Limits:
    """A dialog API of the test's own: everything is allowed unless it is told otherwise."""

    answers: dict[str, MailLimitAnswer | Callable[[], MailLimitAnswer]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    otherwise: MailLimit = MailLimit.ALLOWED

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        assert lady_api_id
        self.asked.append(man_ulid)
        answer = self.answers.get(man_ulid, MailLimitAnswer(self.otherwise, "the test says so"))
        return answer() if callable(answer) else answer


@pytest.fixture
def store(valkey, valkey_url):
    assert valkey.ping()
    with Redis.from_url(valkey_url) as client:
        yield RedisStore(client, LOG)


@pytest.fixture
def limits():
    return Limits()


@pytest.fixture
def new_checks(chathouse, store, limits):
    made = []

    def make(**options):
        checks = OperatorChecks(
            chathouse.jobs_engine, PostChatMailOptions(**options), api=limits, bounds=BOUNDS, store=store, log=LOG
        )
        made.append(checks)
        return checks

    yield make
    for checks in made:
        checks.close()


@pytest.fixture
def check(new_checks):
    """Runs a whole check, by hand: due times are ignored."""

    def run(operators=None, *, options=None, **order):
        checks = new_checks(**options or {})
        done = checks.create_tasks(checks.check_mail_limits(checks.find_candidates(operators, **order)))
        checks.close()
        return done

    return run


@pytest.fixture
def look(chathouse, store):
    def run(**options):
        shard = options.pop("shard", 0)
        return look_at_operators(chathouse.jobs_engine, store, PostChatMailOptions(**options), shard=shard)

    return run


def outcomes(checked):
    return {str(result.chat.pair): result.outcome for result in checked.results}


class TestATask:
    def test_is_created_after_a_paid_chat_that_no_mail_followed(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator("anna"))
        checked = check()
        assert outcomes(checked) == {str(dialog): Outcome.CREATED}
        (task,) = chathouse.tasks()
        assert (task["kind"], task["module"], task["status"]) == ("NeedToWriteMailTask", "postChatMail", "active")
        assert (task["operator_id"], task["lady_db_id"]) == ("anna", dialog.lady.db_id)
        assert task["man_ulid"] == dialog.man_ulid
        happened = chathouse.value("SELECT happened_at FROM chathouse.chat_activity")
        assert task["event_at"] == happened
        assert task["event_trigger"] == checked.results[0].chat.moment
        assert task["closed_at"] is None

    def test_is_created_once_however_often_the_operator_is_checked(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator())
        check()
        for _ in range(3):
            assert outcomes(check()) == {}
        (task,) = chathouse.tasks()
        chathouse.close_task(task["id"])
        assert outcomes(check()) == {}
        assert len(chathouse.tasks(dialog)) == 1

    def test_is_created_anew_for_a_new_chat_once_the_last_one_is_closed(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator(), age="30min")
        check()
        (task,) = chathouse.tasks()
        chathouse.add_activity(dialog, "11min")
        assert outcomes(check()) == {str(dialog): Outcome.ACTIVE_TASK}
        chathouse.close_task(task["id"])
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}
        assert len(chathouse.tasks()) == 2


class TestWhatCounts:
    @pytest.mark.parametrize("action", sorted(PAID_ACTIONS))
    def test_each_of_the_paid_actions(self, chathouse, check, action):
        dialog = chathouse.add_dialog(chathouse.add_lady(chathouse.add_operator()))
        chathouse.add_activity(dialog, action=action)
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}

    @pytest.mark.parametrize(
        "activity",
        [
            {"action": "profile_view"},
            {"action": None},
            {"sum": "0"},
            {"sum": None},
            {"is_free": True},
            {"is_free": None},
            {"age": "1441h"},
        ],
        ids=str,
    )
    def test_nothing_else(self, chathouse, check, activity):
        dialog = chathouse.add_dialog(chathouse.add_lady(chathouse.add_operator()))
        chathouse.add_activity(dialog, **activity)
        assert outcomes(check()) == {}
        assert chathouse.tasks() == []

    @pytest.mark.parametrize("flag", ["is_active", "is_favorite", "has_mail_limits"])
    @pytest.mark.parametrize("value", [False, None])
    def test_only_active_favourite_dialogs_with_mail_limits(self, chathouse, check, flag, value):
        dialog = chathouse.add_dialog(chathouse.add_lady(chathouse.add_operator()), **{flag: value})
        chathouse.add_activity(dialog)
        assert outcomes(check()) == {}

    def test_an_activity_of_another_pair_does_not(self, chathouse, check):
        operator = chathouse.add_operator()
        lady = chathouse.add_lady(operator)
        dialog, other = chathouse.add_dialog(lady), chathouse.add_dialog(chathouse.add_lady(operator))
        chathouse.add_activity(other)
        assert outcomes(check()) == {str(other): Outcome.CREATED}
        assert chathouse.tasks(dialog) == []

    def test_only_the_newest_activity_of_a_pair(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator(), age="2h")
        chathouse.add_activity(dialog, "1min")
        assert outcomes(check()) == {str(dialog): Outcome.FRESH}
        assert chathouse.tasks() == []


class TestAMail:
    def test_after_the_chat_answers_it_and_is_remembered(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator(), age="30min")
        chathouse.add_mail(dialog, "29min", operator_id="somebody-else")
        assert outcomes(check()) == {str(dialog): Outcome.ANSWERED}
        chathouse.run("DELETE FROM chathouse.inmails")
        assert outcomes(check()) == {}
        assert chathouse.tasks() == []
        assert chathouse.value("SELECT reason FROM pin_jobs.closed_tasks") == "answered"

    def test_before_the_chat_or_at_the_very_moment_does_not(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator(), age="30min")
        chathouse.add_mail(dialog, at=chathouse.value("SELECT happened_at FROM chathouse.chat_activity"))
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}

    def test_a_microsecond_after_the_chat_does(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator(), age="30min")
        happened = chathouse.value("SELECT happened_at FROM chathouse.chat_activity")
        chathouse.add_mail(dialog, at=happened + timedelta(microseconds=1))
        assert outcomes(check()) == {str(dialog): Outcome.ANSWERED}

    def test_of_the_evening_before_counts_after_midnight(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator(), age="26h")
        chathouse.add_mail(dialog, "25h")
        assert outcomes(check()) == {str(dialog): Outcome.ANSWERED}


class TestWhatIsClosed:
    @pytest.mark.parametrize("status", ["active", "closed", "cancelled"])
    @pytest.mark.parametrize("form", ["moment", "trigger"])
    def test_stays_closed_for_a_task_of_ours_in_any_status(self, chathouse, check, status, form):
        dialog = chathouse.add_chat(chathouse.add_operator())
        happened = chathouse.value("SELECT happened_at FROM chathouse.chat_activity")
        trigger = happened.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = {"event_at": happened} if form == "moment" else {"event_trigger": trigger}
        chathouse.add_task(dialog, kind="SomethingElse", status=status, **event)
        assert outcomes(check()) == {}

    def test_a_task_of_another_module_is_no_reason(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator())
        happened = chathouse.value("SELECT happened_at FROM chathouse.chat_activity")
        chathouse.add_task(dialog, module="mail", status="closed", event_at=happened)
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}

    def test_the_first_check_of_a_runner_restores_both_forms_of_key(self, chathouse, check):
        operator = chathouse.add_operator()
        dialog = chathouse.add_dialog(chathouse.add_lady(operator))
        moment = chathouse.value("SELECT date_trunc('milliseconds', clock_timestamp() - interval '1 day')")
        chathouse.add_task(dialog, status="closed", event_at=moment, event_trigger="trigger-9", age="20h")
        chathouse.add_task(dialog, status="closed", event_trigger="too old", age="1500h")
        chathouse.add_task(dialog, module="mail", status="closed", event_trigger="another module")
        check()
        keys = {row["key"] for row in chathouse.rows("SELECT key FROM pin_jobs.closed_tasks")}
        written = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        assert keys == {f"{dialog}_trigger-9", f"{dialog}_{written}"}

    def test_a_runner_is_restored_once_and_a_restarted_one_again(self, chathouse, check):
        operator = chathouse.add_operator()
        check()
        dialog = chathouse.add_dialog(chathouse.add_lady(operator))
        chathouse.add_task(dialog, status="closed", event_trigger="later")
        check()
        assert chathouse.rows("SELECT key FROM pin_jobs.closed_tasks") == []
        chathouse.start_runner(operator)
        check()
        assert len(chathouse.rows("SELECT key FROM pin_jobs.closed_tasks")) == 2


class TestAnActiveTask:
    @pytest.mark.parametrize("kind", ["UnansweredMailTask", "UnansweredMessageTask", "NeedToWriteMailTask"])
    def test_of_the_pair_forbids_another(self, chathouse, check, kind):
        dialog = chathouse.add_chat(chathouse.add_operator())
        chathouse.add_task(dialog, kind=kind, module="another")
        assert outcomes(check()) == {str(dialog): Outcome.ACTIVE_TASK}

    @pytest.mark.parametrize(("kind", "status"), [("SomethingElse", "active"), ("UnansweredMailTask", "closed")])
    def test_of_another_kind_or_a_closed_one_does_not(self, chathouse, check, kind, status):
        dialog = chathouse.add_chat(chathouse.add_operator())
        chathouse.add_task(dialog, kind=kind, module="another", status=status)
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}


class TestTheLimits:
    def test_that_have_run_out_leave_the_pair_alone_for_ten_minutes(self, chathouse, check, limits, valkey):
        dialog = chathouse.add_chat(chathouse.add_operator())
        limits.otherwise = MailLimit.LIMITED
        assert outcomes(check()) == {str(dialog): Outcome.NO_LIMITS}
        mark = f"chathouse:checkPostChatMailDialog:{dialog}"
        assert 0 < valkey.ttl(mark) <= 600
        limits.otherwise = MailLimit.ALLOWED
        assert outcomes(check()) == {str(dialog): Outcome.FORGOTTEN}
        assert len(limits.asked) == 1
        valkey.delete(mark)
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}

    def test_that_are_unknown_are_asked_for_again_at_the_next_check(self, chathouse, check, limits, valkey):
        dialog = chathouse.add_chat(chathouse.add_operator())
        limits.otherwise = MailLimit.UNKNOWN
        for _ in range(2):
            assert outcomes(check()) == {str(dialog): Outcome.UNKNOWN}
        assert len(limits.asked) == 2
        assert valkey.keys("chathouse:checkPostChatMailDialog:*") == []
        assert chathouse.tasks() == []

    def test_of_the_second_of_three_that_always_fails_stop_no_other(self, chathouse, check, limits):
        first, second, third = chathouse.add_chats(chathouse.add_operator(), 3)

        def fail():
            raise RuntimeError("a fault of the adapter")

        limits.answers[second.man_ulid] = fail
        for _ in range(5):
            check()
        assert [len(chathouse.tasks(dialog)) for dialog in (first, second, third)] == [1, 0, 1]

    def test_a_pause_that_the_api_asks_for_holds_for_every_run(self, chathouse, check, limits):
        dialog = chathouse.add_chat(chathouse.add_operator())
        limits.answers[dialog.man_ulid] = MailLimitAnswer(MailLimit.UNKNOWN, "429", paused_for=timedelta(minutes=5))
        check()
        limits.answers.clear()
        checked = check()
        assert outcomes(checked) == {str(dialog): Outcome.UNKNOWN}
        assert "left alone until" in checked.results[0].detail
        assert len(limits.asked) == 1
        chathouse.run("UPDATE pin_jobs.dialog_api_pause SET until = clock_timestamp()")
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}


class TestWhatComesInBetween:
    """Between the reading and the writing, while the dialog API is asked."""

    @pytest.fixture
    def interrupted(self, chathouse, new_checks):
        """A check up to its last step."""
        dialog = chathouse.add_chat(chathouse.add_operator("anna"), age="1h")
        checks = new_checks()
        return dialog, checks, checks.check_mail_limits(checks.find_candidates(None))

    @pytest.mark.parametrize("what", ["mail", "active task", "the key", "a task of the same activity", "a newer chat"])
    def test_forbids_the_task(self, chathouse, interrupted, what):
        dialog, checks, limits = interrupted
        chat = limits.results[0].chat
        match what:
            case "mail":
                chathouse.add_mail(dialog)
            case "active task":
                chathouse.add_task(dialog, kind="UnansweredMailTask", module="another")
            case "the key":
                chathouse.run("INSERT INTO pin_jobs.closed_tasks VALUES (:key, now(), 'answered')", key=chat.key)
            case "a task of the same activity":
                chathouse.add_task(dialog, status="closed", event_at=chat.happened_at)
            case "a newer chat":
                chathouse.add_activity(dialog, "1s")
        before = len(chathouse.tasks())
        assert outcomes(checks.create_tasks(limits)) == {str(dialog): Outcome.OVERTAKEN}
        assert len(chathouse.tasks()) == before

    def test_a_lease_that_ran_out_fails_the_operator_and_nothing_is_written(self, chathouse, interrupted, check):
        dialog, checks, limits = interrupted
        chathouse.run("UPDATE pin_jobs.operator_checks SET lease_until = clock_timestamp()")
        checked = checks.create_tasks(limits)
        assert list(checked.failures) == ["anna"]
        assert "lease" in checked.failures["anna"]
        assert chathouse.tasks() == []
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}

    def test_a_lease_that_somebody_else_took_over_is_theirs(self, chathouse, interrupted, new_checks):
        _, checks, limits = interrupted
        chathouse.run("UPDATE pin_jobs.operator_checks SET lease_until = clock_timestamp()")
        other = new_checks()
        theirs = other.check_mail_limits(other.find_candidates(None))
        assert list(checks.create_tasks(limits).failures) == ["anna"]
        checks.close()
        assert other.create_tasks(theirs).failures == {}
        assert len(chathouse.tasks()) == 1

    def test_two_that_both_hold_candidates_create_one_task(self, chathouse, interrupted, check):
        dialog, checks, limits = interrupted
        # The lady goes to another operator, who is checked meanwhile.
        chathouse.add_operator("berta")
        chathouse.run("UPDATE chathouse.ladies SET operator_id = 'berta'")
        assert outcomes(check(["berta"])) == {str(dialog): Outcome.CREATED}
        assert outcomes(checks.create_tasks(limits)) == {str(dialog): Outcome.OVERTAKEN}
        assert len(chathouse.tasks()) == 1


class TestOperators:
    def test_at_work_are_checked_and_the_next_check_is_due_a_minute_later(self, chathouse, check):
        chathouse.add_operator("anna")
        chathouse.add_operator("berta", stopped="1min")
        checked = check()
        assert [operator.operator_id for operator in checked.operators] == ["anna"]
        (row,) = chathouse.rows("SELECT *, next_check - clock_timestamp() AS left FROM pin_jobs.operator_checks")
        assert (row["operator_id"], row["lease_token"], row["lease_until"]) == ("anna", None, None)
        assert timedelta(seconds=50) < row["left"] <= timedelta(seconds=60)

    def test_that_are_named_but_not_at_work_are_left_out_with_a_reason(self, chathouse, check):
        chathouse.add_operator("berta", stopped="1min")
        checked = check(["berta", "nobody"])
        assert checked.left_out == {"berta": "its runner has stopped", "nobody": "it has no runner"}
        assert checked.operators == ()

    def test_whose_runner_has_stopped_are_served_by_a_backfill(self, chathouse, check):
        dialog = chathouse.add_chat(chathouse.add_operator("berta", stopped="1min"))
        assert outcomes(check(["berta"], stopped_too=True)) == {str(dialog): Outcome.CREATED}

    def test_that_somebody_else_checks_are_left_out(self, chathouse, check, new_checks):
        chathouse.add_operator("anna")
        new_checks().find_candidates(None)
        checked = check(["anna"])
        assert "somebody else checks it" in checked.left_out["anna"]

    def test_that_somebody_else_checks_are_waited_for_by_a_backfill(self, chathouse, check, new_checks):
        dialog = chathouse.add_chat(chathouse.add_operator("anna"))
        other = new_checks()
        other.find_candidates(None)
        timer = threading.Timer(0.3, other.close)
        timer.start()
        checked = check(["anna"], wait_for_lease=timedelta(seconds=20))
        timer.join()
        assert outcomes(checked) == {str(dialog): Outcome.CREATED}

    def test_that_are_not_due_are_left_out_of_a_run_that_was_asked_for_twice(self, chathouse, check):
        chathouse.add_operator("anna")
        assert len(check(["anna"], only_due=True).operators) == 1
        assert check(["anna"], only_due=True).left_out == {"anna": "it was checked in the meantime"}

    def test_of_a_dead_worker_are_free_once_the_lease_runs_out(self, chathouse, check, new_checks):
        dialog = chathouse.add_chat(chathouse.add_operator("anna"))
        new_checks().find_candidates(None)
        chathouse.run("UPDATE pin_jobs.operator_checks SET lease_until = clock_timestamp()")
        assert outcomes(check()) == {str(dialog): Outcome.CREATED}

    def test_after_a_failure_are_given_back_and_due_a_minute_later(self, chathouse, new_checks):
        chathouse.add_operator("anna")
        checks = new_checks()
        checks.find_candidates(None)
        checks.close()
        (row,) = chathouse.rows(
            "SELECT lease_token, next_check > clock_timestamp() AS later FROM pin_jobs.operator_checks"
        )
        assert dict(row) == {"lease_token": None, "later": True}

    def test_one_that_always_fails_never_stops_the_others(self, chathouse, check):
        good, bad = chathouse.add_operator("anna"), chathouse.add_operator("berta")
        dialog, other = chathouse.add_chat(good), chathouse.add_chat(bad)
        chathouse.run("ALTER TABLE chathouse.operator_tasks ADD CONSTRAINT never CHECK (operator_id <> 'berta')")
        for _ in range(2):
            checked = check()
            assert list(checked.failures) == ["berta"]
            assert "never" in checked.failures["berta"]
        assert [len(chathouse.tasks(dialog)), len(chathouse.tasks(other))] == [1, 0]

    def test_without_profiles_or_dialogs_are_checked_and_find_nothing(self, chathouse, check):
        chathouse.add_operator("anna")
        chathouse.add_operator("berta", ladies=2)
        checked = check()
        assert len(checked.operators) == 2
        assert checked.results == ()

    def test_many_at_once_take_each_once(self, chathouse, new_checks):
        for number in range(20):
            chathouse.add_operator(f"operator-{number}")
        barrier = threading.Barrier(6)
        held = []

        def take():
            checks = new_checks()
            barrier.wait(10)
            held.extend(operator.operator_id for operator in checks.find_candidates(None).operators)

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert Counter(held) == {f"operator-{number}": 1 for number in range(20)}


class TestTheLook:
    def test_asks_for_a_run_of_those_with_a_chat_and_checks_off_the_rest(self, chathouse, look):
        chathouse.add_chat(chathouse.add_operator("anna"))
        chathouse.add_operator("berta")
        seen = look()
        assert (seen.requested, seen.checked_off) == (("anna",), ("berta",))
        again = look()
        assert (again.requested, again.checked_off) == ((), ())

    @pytest.mark.parametrize(
        ("ladies", "started", "is_due"), [(10, "9s", False), (10, "11s", True), (11, "29s", False), (11, "31s", True)]
    )
    def test_keeps_to_the_first_delays(self, chathouse, look, ladies, started, is_due):
        chathouse.add_operator("anna", started=started, ladies=ladies)
        assert bool(look().checked_off) is is_due

    def test_leaves_alone_a_stopped_runner_and_starts_over_with_a_restarted_one(self, chathouse, look):
        chathouse.add_operator("anna")
        assert look().checked_off == ("anna",)
        chathouse.stop_runner("anna")
        chathouse.run("UPDATE pin_jobs.operator_checks SET next_check = clock_timestamp()")
        assert look().checked_off == ()
        chathouse.start_runner("anna", age="11s")
        assert look().checked_off == ("anna",)

    def test_asks_again_when_no_run_came_within_a_minute(self, chathouse, look):
        chathouse.add_chat(chathouse.add_operator("anna"))
        look()
        chathouse.run("UPDATE pin_jobs.operator_checks SET requested_until = clock_timestamp()")
        assert look().requested == ("anna",)

    def test_finds_nothing_to_act_on_in_what_is_fresh_answered_forgotten_or_active(self, chathouse, look, valkey):
        operator = chathouse.add_operator("anna")
        lady = chathouse.add_lady(operator)
        chathouse.add_chat(operator, "1min", lady=lady)
        answered = chathouse.add_chat(operator, lady=lady)
        chathouse.add_mail(answered)
        forgotten = chathouse.add_chat(operator, lady=lady)
        valkey.set(f"chathouse:checkPostChatMailDialog:{forgotten}", 1, ex=60)
        chathouse.add_task(chathouse.add_chat(operator, lady=lady), kind="UnansweredMailTask", module="x")
        seen = look()
        assert (seen.requested, seen.checked_off) == ((), ("anna",))
        assert [row["reason"] for row in chathouse.rows("SELECT * FROM pin_jobs.closed_tasks")] == ["answered"]

    def test_does_not_check_off_whom_somebody_checks(self, chathouse, look, new_checks):
        chathouse.add_operator("anna")
        new_checks().find_candidates(None)
        assert look().checked_off == ()

    def test_shares_the_operators_between_shards(self, chathouse, look):
        names = {chathouse.add_operator(f"operator-{number}") for number in range(30)}
        shares = [set(look(sensor_shards=3, shard=shard).checked_off) for shard in range(3)]
        assert set.union(*shares) == names
        assert sum(map(len, shares)) == len(names)
        assert all(shares)

    def test_refills_the_store_of_those_it_checks_off(self, chathouse, look, check, valkey):
        chathouse.add_chat(chathouse.add_operator("anna"))
        check()
        (task,) = chathouse.tasks()
        valkey.flushall()
        chathouse.run("UPDATE pin_jobs.operator_checks SET next_check = clock_timestamp()")
        assert look().checked_off == ("anna",)
        assert list(valkey.hgetall("chathouse:operator:anna:tasks")) == [str(task["id"])]
