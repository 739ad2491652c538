"""The rules, row by row of the document on PostChatMailTaskRunner."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from pin_jobs.chathouse.dialogs import (
    PAID_ACTIONS,
    Chat,
    Operator,
    Outcome,
    Pair,
    closed_key,
    decide,
    due_at,
    is_reserved,
    key_moment,
    split,
    task_id,
)
from pin_jobs.chathouse.options import PostChatMailOptions

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
OPTIONS = PostChatMailOptions()
TIMES = OPTIONS.times
SILENCE = OPTIONS.silence
MICROSECOND = timedelta(microseconds=1)
PAIR = Pair(7, "01HF8Z3K0000000000000000MN")
CHAT = Chat(
    operator_id="o", pair=PAIR, lady_api_id="l", happened_at=NOW - SILENCE, has_newer_mail=False, active_task=None
)


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def an_operator(**values) -> Operator:
    return Operator(**{"operator_id": "o", "started_at": NOW, "is_running": True, "profiles": 1, **values})


class TestTheTimers:
    @pytest.mark.parametrize(("profiles", "delay"), [(0, 10), (1, 10), (10, 10), (11, 30), (500, 30)])
    def test_the_first_check_waits_longer_for_an_operator_of_many_profiles(self, profiles, delay):
        assert due_at(an_operator(profiles=profiles), TIMES, NOW) == NOW + seconds(delay)

    @pytest.mark.parametrize("profiles", [1, 11])
    def test_the_next_check_is_due_when_the_last_one_says(self, profiles):
        due = NOW + seconds(37)
        operator = an_operator(profiles=profiles, checked_since=NOW, next_check=due)
        assert due_at(operator, TIMES, NOW) == due

    def test_a_restarted_runner_starts_over(self):
        operator = an_operator(checked_since=NOW - timedelta(hours=1), next_check=NOW + seconds(55))
        assert operator.is_first_check
        assert due_at(operator, TIMES, NOW) == NOW + seconds(10)

    def test_a_stopped_runner_is_not_checked(self):
        assert due_at(an_operator(is_running=False), TIMES, NOW) is None

    def test_a_moment_from_before_the_clock_was_set_back_counts_as_due(self):
        operator = an_operator(checked_since=NOW, next_check=NOW + seconds(60) + MICROSECOND)
        assert due_at(operator, TIMES, NOW) == NOW
        operator = replace(operator, next_check=NOW + seconds(60))
        assert due_at(operator, TIMES, NOW) == NOW + seconds(60)

    @pytest.mark.parametrize(
        ("until", "holds"),
        [
            (None, False),
            (NOW - MICROSECOND, False),
            (NOW, False),
            (NOW + MICROSECOND, True),
            (NOW + seconds(120), True),
            (NOW + seconds(120) + MICROSECOND, False),
        ],
    )
    def test_a_lease_holds_until_its_end_and_never_longer_than_it_can_be(self, until, holds):
        assert is_reserved(until, NOW, seconds(120)) is holds


class TestTheActivities:
    def test_twelve_count(self):
        assert sorted(PAID_ACTIONS) == [
            "audio_message_send",
            "photo_message_send",
            "present_send",
            "profile_erotic_photo",
            "profile_private_library_photo",
            "profile_private_library_video",
            "profile_private_photo",
            "send_gift",
            "sticker_message_send",
            "text_message_send",
            "video_message_send",
            "watch_private_video",
        ]


class TestTheDecision:
    @pytest.mark.parametrize(
        ("age", "outcome"),
        [
            (timedelta(0), Outcome.FRESH),
            (-seconds(5), Outcome.FRESH),
            (SILENCE - MICROSECOND, Outcome.FRESH),
            (SILENCE, Outcome.CANDIDATE),
            (timedelta(days=59), Outcome.CANDIDATE),
        ],
    )
    def test_a_chat_younger_than_ten_minutes_is_left_for_a_later_check(self, age, outcome):
        assert decide(replace(CHAT, happened_at=NOW - age), NOW, SILENCE) is outcome

    @pytest.mark.parametrize("kind", ["UnansweredMailTask", "UnansweredMessageTask", "NeedToWriteMailTask"])
    def test_a_pair_with_an_active_task_is_skipped(self, kind):
        assert decide(replace(CHAT, active_task=kind), NOW, SILENCE) is Outcome.ACTIVE_TASK

    def test_a_mail_since_answers_whatever_else_holds(self):
        chat = replace(CHAT, has_newer_mail=True, active_task="UnansweredMailTask", happened_at=NOW)
        assert decide(chat, NOW, SILENCE) is Outcome.ANSWERED


class TestTheKeys:
    @pytest.mark.parametrize(
        ("moment", "written"),
        [
            (datetime(2026, 1, 2, 3, 4, 5, 678_999, UTC), "2026-01-02T03:04:05.678Z"),
            (datetime(2026, 1, 2, 3, 4, 5, 0, UTC), "2026-01-02T03:04:05.000Z"),
            (datetime(2026, 1, 2, 3, 4, 5, 999_999, UTC), "2026-01-02T03:04:05.999Z"),
            (datetime(2026, 1, 2, 3, 4, 5, 1000, timezone(timedelta(hours=2))), "2026-01-02T01:04:05.001Z"),
        ],
    )
    def test_a_moment_is_utc_with_milliseconds_cut_off(self, moment, written):
        assert key_moment(moment) == written

    def test_have_two_forms(self):
        assert replace(CHAT, happened_at=NOW).key == "7_01HF8Z3K0000000000000000MN_2026-11-30T12:00:00.000Z"
        assert closed_key(PAIR, "trigger-9") == "7_01HF8Z3K0000000000000000MN_trigger-9"

    def test_one_activity_has_one_task_id_for_ever(self):
        assert str(task_id(replace(CHAT, happened_at=NOW))) == "7adafa82-3583-531e-a5ec-96331277578b"
        assert task_id(CHAT) == task_id(replace(CHAT, operator_id="another", active_task="x"))
        assert task_id(CHAT) != task_id(replace(CHAT, happened_at=NOW))


def test_operators_are_split_into_runs():
    assert split([], 2) == []
    assert split(list("abcde"), 2) == [["a", "b"], ["c", "d"], ["e"]]


def test_keys_outlive_the_window_in_which_activity_counts():
    assert OPTIONS.closed_key_ttl == timedelta(days=67)
    assert PostChatMailOptions(activity_window=timedelta(days=10)).closed_key_ttl > timedelta(days=10)
