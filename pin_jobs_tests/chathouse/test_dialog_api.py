"""Asking for many dialogs at once; the APIs here are what a host's adapter is: a class with one method."""

import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest

from pin_jobs.chathouse.dialog_api import DialogId, MailLimit, MailLimitAnswer, StageBounds, ask_all
from pin_jobs_tests.conftest import Interrupted
from pin_jobs_tests.waiting import wait_for

LOG = logging.getLogger("pin_jobs_tests")
ALLOWED = MailLimitAnswer(MailLimit.ALLOWED, "mails left")
OUTAGE = MailLimitAnswer(MailLimit.UNKNOWN, "no answer within 10 s", is_outage=True)
BAD_ANSWER = MailLimitAnswer(MailLimit.UNKNOWN, "an empty answer")


class Api:
    """An adapter that answers as `answer` says, and keeps account."""

    def __init__(self, answer: Callable[[DialogId], MailLimitAnswer] = lambda _: ALLOWED) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._under_way = 0
        self.asked: list[DialogId] = []
        self.most_at_once = 0
        self.moments: list[float] = []

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        dialog = DialogId(lady_api_id, man_ulid)
        with self._lock:
            self.asked.append(dialog)
            self.moments.append(time.monotonic())
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            return self._answer(dialog)
        finally:
            with self._lock:
                self._under_way -= 1


def some_dialogs(count: int) -> list[DialogId]:
    return [DialogId(f"lady-{number}", "01HZX3V7Q8R2M4N6P8S0T2W4Y6") for number in range(count)]


def within(seconds: float = 20, concurrency: int = 4, **bounds: int) -> StageBounds:
    return StageBounds(concurrency=concurrency, deadline=timedelta(seconds=seconds), **bounds)


def ask(api: Api, dialogs: list[DialogId], bounds: StageBounds | None = None) -> list[MailLimitAnswer]:
    answers = ask_all(api, dialogs, bounds or within(), LOG)
    assert list(answers) == list(dict.fromkeys(dialogs))
    return list(answers.values())


def test_every_dialog_is_asked_for_once_even_when_it_is_named_twice() -> None:
    api = Api(lambda dialog: MailLimitAnswer(MailLimit.LIMITED, dialog.lady_api_id))
    dialogs = some_dialogs(50)
    assert [answer.reason for answer in ask(api, dialogs + dialogs)] == [dialog.lady_api_id for dialog in dialogs]
    assert sorted(api.asked) == sorted(dialogs)


def test_no_dialogs_need_no_request() -> None:
    assert ask(Api(), []) == []


def test_as_many_are_asked_for_at_once_as_is_allowed_and_no_more() -> None:
    together = threading.Barrier(3)

    def meet(_: DialogId) -> MailLimitAnswer:
        together.wait(10)
        return ALLOWED

    api = Api(meet)
    assert set(ask(api, some_dialogs(9), within(concurrency=3))) == {ALLOWED}
    assert api.most_at_once == 3


@pytest.mark.parametrize("fault", [RuntimeError("s3cr3t"), None], ids=["raises", "returns nothing"])
def test_one_dialog_that_always_fails_never_stops_the_others(
    fault: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = dialogs = some_dialogs(3)

    def answer(dialog: DialogId) -> MailLimitAnswer:
        if dialog != second:
            return ALLOWED
        if fault:
            raise fault
        return None  # type: ignore[return-value]  # an adapter with a fault

    for _ in range(5):
        answers = ask_all(Api(answer), dialogs, within(), LOG)
        assert (answers[first], answers[third]) == (ALLOWED, ALLOWED)
        assert answers[second].limit is MailLimit.UNKNOWN
    assert "s3cr3t" not in caplog.text


def test_what_hangs_is_unknown_at_the_deadline_and_the_rest_is_answered() -> None:
    over = threading.Event()
    hanging, *others = dialogs = some_dialogs(20)

    def answer(dialog: DialogId) -> MailLimitAnswer:
        if dialog == hanging:
            over.wait(60)
        return ALLOWED

    begun = time.monotonic()
    answers = ask_all(Api(answer), dialogs, within(1), LOG)
    assert 1 <= time.monotonic() - begun < 10
    assert {answers[dialog] for dialog in others} == {ALLOWED}
    assert answers[hanging].limit is MailLimit.UNKNOWN
    over.set()


def test_what_was_not_asked_for_by_the_deadline_is_unknown() -> None:
    over = threading.Event()

    def answer(_: DialogId) -> MailLimitAnswer:
        over.wait(60)
        return ALLOWED

    api = Api(answer)
    answers = ask(api, some_dialogs(10), within(0.2, concurrency=2))
    over.set()
    assert {answer.limit for answer in answers} == {MailLimit.UNKNOWN}
    wait_for(no_threads, 5, "the threads to end")
    assert len(api.asked) == 2


def test_a_dead_api_is_left_alone_after_a_few_requests(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(lambda _: OUTAGE)
    answers = ask(api, some_dialogs(1000), within(concurrency=4, outages=5))
    assert 5 <= len(api.asked) <= 5 + 3
    assert Counter(answer.limit for answer in answers) == {MailLimit.UNKNOWN: 1000}
    (line,) = caplog.messages
    assert line.startswith("the dialog API left 1000 of 1000 dialogs unknown: 99")
    assert "x given up, the API is taken for dead, " in line


def test_an_api_that_rejects_everything_is_left_alone_a_little_later() -> None:
    api = Api(lambda _: BAD_ANSWER)
    ask(api, some_dialogs(1000), within(concurrency=4, outages=5, unknown=20))
    assert 20 <= len(api.asked) <= 20 + 3


def test_an_answer_in_between_shows_that_the_api_lives() -> None:
    turns = iter(range(1000))
    api = Api(lambda _: ALLOWED if next(turns) % 5 == 4 else OUTAGE)
    ask(api, some_dialogs(100), within(concurrency=1, outages=5, unknown=5))
    assert len(api.asked) == 100


def test_dialogs_that_always_fail_do_not_starve_the_one_behind_them() -> None:
    healthy, *dead = some_dialogs(12)
    api = Api(lambda dialog: ALLOWED if dialog == healthy else OUTAGE)
    bounds = within(concurrency=1, outages=5)
    assert any(ask_all(api, [*dead, healthy], bounds, LOG)[healthy] == ALLOWED for _ in range(200))


@pytest.mark.parametrize(("pause", "deadline"), [(30, 60), (4, 3)], ids=["for long", "until after the deadline"])
def test_a_pause_that_cannot_be_waited_for_ends_the_stage_at_once(pause: float, deadline: float) -> None:
    paused = MailLimitAnswer(MailLimit.UNKNOWN, "HTTP 429", paused_for=timedelta(seconds=pause), is_outage=True)
    api = Api(lambda _: paused)
    begun = time.monotonic()
    answers = ask(api, some_dialogs(50), within(deadline, concurrency=1))
    assert time.monotonic() - begun < 2
    assert len(api.asked) == 1
    assert answers.count(paused) == 1
    assert {answer.reason for answer in answers} == {"HTTP 429", "not asked, the API wants to be left alone"}


def test_what_is_under_way_when_the_api_wants_to_be_left_alone_is_waited_for() -> None:
    paused = MailLimitAnswer(MailLimit.UNKNOWN, "HTTP 429", paused_for=timedelta(seconds=30), is_outage=True)
    both, refused = threading.Barrier(2), threading.Event()
    dialogs = some_dialogs(10)
    turns = iter(range(10))

    def answer(_: DialogId) -> MailLimitAnswer:
        is_first = next(turns) == 0
        both.wait(10)
        if is_first:
            refused.set()
            return paused
        refused.wait(10)
        time.sleep(0.1)
        return ALLOWED

    answers = ask(Api(answer), dialogs, within(20, concurrency=2))
    assert (answers.count(paused), answers.count(ALLOWED)) == (1, 1)


def test_what_is_under_way_when_the_api_is_taken_for_dead_is_not() -> None:
    over = threading.Event()
    turns = iter(range(1000))

    def answer(_: DialogId) -> MailLimitAnswer:
        if next(turns) == 0:
            over.wait(60)
        return OUTAGE

    begun = time.monotonic()
    ask(Api(answer), some_dialogs(100), within(30, concurrency=2))
    assert time.monotonic() - begun < 10
    over.set()


def test_a_short_pause_is_kept_to_the_end_and_then_the_rest_is_asked_for() -> None:
    pause = timedelta(seconds=0.4)
    turns = iter(range(1000))

    def answer(_: DialogId) -> MailLimitAnswer:
        # More often than the API may fail in a row.
        is_refused = next(turns) < 2
        return MailLimitAnswer(MailLimit.UNKNOWN, "HTTP 429", pause, is_outage=True) if is_refused else ALLOWED

    api = Api(answer)
    answers = ask(api, some_dialogs(10), within(concurrency=1, outages=1))
    assert answers.count(ALLOWED) == 8
    first, second, third = api.moments[:3]
    assert second - first >= pause.total_seconds()
    assert third - second >= pause.total_seconds()


def test_an_interruption_leaves_at_once_and_starts_no_further_request(interrupt_worker: Callable[[], None]) -> None:
    over, all_four = threading.Event(), threading.Barrier(4)

    def answer(_: DialogId) -> MailLimitAnswer:
        if all_four.wait(10) == 0:
            interrupt_worker()
        over.wait(60)
        return ALLOWED

    api = Api(answer)
    begun = time.monotonic()
    with pytest.raises(Interrupted):
        ask(api, some_dialogs(50), within(30, concurrency=4))
    assert time.monotonic() - begun < 10
    over.set()
    wait_for(no_threads, 5, "the threads to end")
    assert len(api.asked) == 4


HANGS = """
import logging, threading
from datetime import timedelta
from pin_jobs.chathouse.dialog_api import DialogId, StageBounds, ask_all

class Hangs:
    def mail_limit(self, lady_api_id, man_ulid):
        threading.Event().wait(600)

bounds = StageBounds(concurrency=2, deadline=timedelta(seconds=0.1))
print(ask_all(Hangs(), [DialogId("a", "b"), DialogId("c", "d")], bounds, logging.getLogger()))
"""


def test_requests_under_way_do_not_hold_up_the_end_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.count("unknown")) == (0, 2), done.stderr


def no_threads() -> bool:
    return not any(thread.name.startswith("dialog API") for thread in threading.enumerate())
