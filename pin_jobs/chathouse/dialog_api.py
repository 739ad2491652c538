"""The dialog API as the checks see it: may this lady still write mails to this man?

`DialogApi` is what a host implements whose API differs; `ask_all` asks for many dialogs at once, within bounds.
"""

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib import import_module
from typing import Final, NamedTuple, Protocol

from pin_jobs.errors import PinJobsError

_REASONS_LOGGED: Final = 5
_LONGEST_WAIT_SECONDS: Final = 0.5


class MailLimit(StrEnum):
    """What the API says about a dialog; `UNKNOWN` when it says nothing that can be relied on."""

    LIMITED = "limited"
    ALLOWED = "allowed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MailLimitAnswer:
    """An answer of the dialog API.

    `reason`: one short phrase for people; no names, texts, addresses or tokens.
    `paused_for`: how long the API asked to be left alone, from now on (`Retry-After`).
    `is_outage`: an `UNKNOWN` that says more about the API than about this dialog: unreachable, too slow, refusing us.
    """

    limit: MailLimit
    reason: str
    paused_for: timedelta | None = None
    is_outage: bool = False


class DialogId(NamedTuple):
    """How the API names a dialog: the lady's `api_id` and the man's ULID."""

    lady_api_id: str
    man_ulid: str


class DialogApi(Protocol):
    """What a host implements whose API differs from docs/dialog-api.openapi.yaml; see docs/dialog-api.md."""

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        """Ask for one dialog; called from several threads at once, never twice at once for one dialog.

        Returns within a time that the implementation bounds, and returns `UNKNOWN` instead of raising when the API
        errs, is slow or says something odd.
        """
        ...


class InvalidAdapter(PinJobsError):
    """The host's own adapter for its dialog API cannot be used."""

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"the adapter {adapter} of the dialog API {reason}; its form is package.module:name")


def load_adapter(name: str) -> DialogApi:
    """What `package.module:name` makes when it is called; `close` it at the end.

    Raises:
        InvalidAdapter: it cannot be made, or is no `DialogApi`.
    """
    module, _, attribute = name.partition(":")
    try:
        api: DialogApi = getattr(import_module(module), attribute)()
    except Exception as error:  # it is the host's code, a KeyError of its environment for one
        raise InvalidAdapter(name, f"cannot be made ({type(error).__name__})") from error
    if not callable(getattr(api, "mail_limit", None)):
        raise InvalidAdapter(name, "has no method mail_limit")
    return api


def close(api: DialogApi) -> None:
    """Call its method `close`, if it has one."""
    method = getattr(api, "close", None)
    if callable(method):
        method()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBounds:
    """What `ask_all` may take: `concurrency` requests at a time, `deadline` for all of them.

    After so many failures in a row, over all dialogs, the API is taken for dead. `outages` counts the answers with
    `is_outage`, which a few dead dialogs cannot cause; `unknown` counts every unknown answer, so that an API that
    rejects everything is not asked a thousand times either.

    A pause that the API asks for is waited for when it is no longer than `longest_pause`.
    """

    concurrency: int
    deadline: timedelta
    longest_pause: timedelta = timedelta(seconds=5)
    outages: int = 5
    unknown: int = 50


def ask_all(
    api: DialogApi, dialogs: Iterable[DialogId], bounds: StageBounds, log: logging.Logger
) -> Mapping[DialogId, MailLimitAnswer]:
    """Ask for each dialog once, and return within the deadline.

    What could not be asked by then is `UNKNOWN`, and so is what is left when the API is taken for dead or asks to be
    left alone for long. One line is logged about what is unknown.

    An interruption (Terminate) leaves at once: requests under way end in threads that nobody waits for.
    """
    answers = _Stage(api, dialogs, bounds).run()
    unknown = Counter(answer.reason for answer in answers.values() if answer.limit is MailLimit.UNKNOWN)
    if unknown:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in unknown.most_common(_REASONS_LOGGED))
        log.warning("the dialog API left %d of %d dialogs unknown: %s", unknown.total(), len(answers), reasons)
    return answers


class _Stage:
    """The requests of one `ask_all`: threads take dialogs from a queue, the caller waits for what they note down."""

    def __init__(self, api: DialogApi, dialogs: Iterable[DialogId], bounds: StageBounds) -> None:
        self._api = api
        self._bounds = bounds
        self._end = time.monotonic() + bounds.deadline.total_seconds()
        self._dialogs = list(dict.fromkeys(dialogs))
        self._changed = threading.Condition()
        # In random order: dialogs that always fail do not always stand before the same others.
        self._waiting = deque(random.sample(self._dialogs, len(self._dialogs)))
        self._under_way = 0
        self._answers: dict[DialogId, MailLimitAnswer] = {}
        self._paused_until = 0.0
        self._outages_in_a_row = self._unknown_in_a_row = 0
        # Why no further dialog is asked for; and whether those that are being asked for are waited for.
        self._over: str | None = None
        self._is_dead = False

    def run(self) -> Mapping[DialogId, MailLimitAnswer]:
        try:
            # Daemon threads of our own, since those of an executor hold up the end of the process.
            for number in range(min(self._bounds.concurrency, len(self._dialogs))):
                threading.Thread(target=self._work, name=f"dialog API {number}", daemon=True).start()
            with self._changed:
                self._wait()
                without = MailLimitAnswer(MailLimit.UNKNOWN, str(self._over))
                return {dialog: self._answers.get(dialog, without) for dialog in self._dialogs}
        finally:
            with self._changed:
                self._stop("interrupted")

    def _wait(self) -> None:
        while not self._is_dead and (self._under_way or (self._waiting and self._over is None)):
            left = self._end - time.monotonic()
            if left <= 0:
                self._stop("no time was left for it")
                return
            # A signal that comes just before the waiting begins is noticed at its end.
            self._changed.wait(min(left, _LONGEST_WAIT_SECONDS))

    def _stop(self, reason: str) -> None:
        self._over = self._over or reason
        self._changed.notify_all()

    def _work(self) -> None:
        while (dialog := self._take()) is not None:
            answer = self._ask(dialog)
            with self._changed:
                self._note(dialog, answer)

    def _take(self) -> DialogId | None:
        with self._changed:
            while self._waiting and self._over is None:
                pause = self._paused_until - time.monotonic()
                if pause <= 0:
                    self._under_way += 1
                    return self._waiting.popleft()
                self._changed.wait(pause)
            return None

    def _ask(self, dialog: DialogId) -> MailLimitAnswer:
        fault = "returned no answer"
        try:
            answer: object = self._api.mail_limit(*dialog)
            if isinstance(answer, MailLimitAnswer):
                return answer
        except Exception as error:  # noqa: BLE001  # a fault of an adapter is this dialog's, never the others'
            fault = f"failed with {type(error).__name__}"
        return MailLimitAnswer(MailLimit.UNKNOWN, f"the adapter {fault}")

    def _note(self, dialog: DialogId, answer: MailLimitAnswer) -> None:
        self._answers[dialog] = answer
        self._under_way -= 1
        is_unknown = answer.limit is MailLimit.UNKNOWN
        # Who says when to come back is not dead; keeping away until then is enough.
        is_outage = is_unknown and answer.is_outage and not answer.paused_for
        self._unknown_in_a_row = self._unknown_in_a_row + 1 if is_unknown else 0
        self._outages_in_a_row = self._outages_in_a_row + 1 if is_outage else 0
        if answer.paused_for:
            self._pause(answer.paused_for)
        if self._outages_in_a_row >= self._bounds.outages or self._unknown_in_a_row >= self._bounds.unknown:
            self._is_dead = True
            self._stop("given up, the API is taken for dead")
        self._changed.notify_all()

    def _pause(self, pause: timedelta) -> None:
        self._paused_until = max(self._paused_until, time.monotonic() + pause.total_seconds())
        if pause > self._bounds.longest_pause or self._paused_until >= self._end:
            self._stop("not asked, the API wants to be left alone")
