"""The rules of the post-chat mail: who is checked when, and what a chat without a mail asks for.

Pure functions over values; the moment is always passed in. Source: the document on PostChatMailTaskRunner, whose
sections are named below. Words: RU is the man, TU the lady that an operator answers for.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

PAID_ACTIONS = frozenset(
    {
        "text_message_send",
        "photo_message_send",
        "video_message_send",
        "audio_message_send",
        "sticker_message_send",
        "send_gift",
        "present_send",
        "watch_private_video",
        "profile_erotic_photo",
        "profile_private_photo",
        "profile_private_library_video",
        "profile_private_library_photo",
    }
)
"""What a man does in a chat that counts ("Цикл перевірки", step 2); any other action is ignored."""

TASK_NAMESPACE = uuid.UUID("b7c1d0de-2f1b-5a55-8d3e-6a1c0f2e9d41")
"""Fixed for ever: the ids of tasks are derived under it."""
TASK_KIND = "NeedToWriteMailTask"
MODULE = "postChatMail"
BLOCKING_KINDS = ("UnansweredMailTask", "UnansweredMessageTask", TASK_KIND)
"""While a pair has an active task of these kinds, no other is created ("Обмеження")."""


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A lady and a man."""

    lady_db_id: int
    man_ulid: str

    def __str__(self) -> str:
        return f"{self.lady_db_id}_{self.man_ulid}"


@dataclass(frozen=True, slots=True)
class CheckTimes:
    """When operators are checked ("Таймери"). A runner of many profiles begins later, which spreads the load."""

    first: timedelta
    first_of_many: timedelta
    many_profiles: int
    interval: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator runner and what is known of its checks. Moments are the database's.

    `checked_since`: the start of the runner that `next_check` belongs to.
    """

    operator_id: str
    started_at: datetime | None
    is_running: bool
    profiles: int
    checked_since: datetime | None = None
    next_check: datetime | None = None
    last_completed: datetime | None = None
    requested_until: datetime | None = None
    lease_until: datetime | None = None

    @property
    def is_first_check(self) -> bool:
        """Whether this runner was never checked: it is new, or was restarted."""
        return self.next_check is None or self.checked_since != self.started_at


class Outcome(StrEnum):
    """What became of a pair in a check, in words for people."""

    CREATED = "created"
    ANSWERED = "answered"
    FRESH = "fresh"
    ACTIVE_TASK = "active task"
    FORGOTTEN = "forgotten"
    NO_LIMITS = "no limits"
    UNKNOWN = "unknown"
    OVERTAKEN = "overtaken"
    CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A pair's newest paid activity that no task and no mail is remembered for, and what else decides on it."""

    operator_id: str
    pair: Pair
    lady_api_id: str
    happened_at: datetime
    has_newer_mail: bool
    active_task: str | None

    @property
    def moment(self) -> str:
        """The activity's moment as the keys and the task's `event_trigger` have it."""
        return key_moment(self.happened_at)

    @property
    def key(self) -> str:
        """Under which this activity is remembered as closed."""
        return closed_key(self.pair, self.moment)


@dataclass(frozen=True, slots=True)
class PairResult:
    """What became of one pair, and a word on why."""

    chat: Chat
    outcome: Outcome
    detail: str = ""


def due_at(operator: Operator, times: CheckTimes, now: datetime) -> datetime | None:
    """When the next check of an operator is due; `None` for one whose runner has stopped ("Таймери").

    A stored moment further ahead than one interval was written before the clock was set back, and counts as due.
    """
    if not operator.is_running or operator.started_at is None:
        return None
    if operator.is_first_check or operator.next_check is None:
        delay = times.first if operator.profiles <= times.many_profiles else times.first_of_many
        return operator.started_at + delay
    return min(operator.next_check, now) if operator.next_check > now + times.interval else operator.next_check


def is_reserved(until: datetime | None, now: datetime, longest: timedelta) -> bool:
    """Whether a request or a lease holds at `now`; one further ahead than it can be (a clock set back) does not."""
    return until is not None and now < until <= now + longest


def key_moment(moment: datetime) -> str:
    """UTC, ISO 8601, milliseconds (cut off, never rounded) and `Z`."""
    # isoformat cuts off by itself.
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def closed_key(pair: Pair, moment_or_trigger: str) -> str:
    """Both forms of key ("Кеш оброблених подій"): with the activity's moment, or with a task's `event_trigger`."""
    return f"{pair.lady_db_id}_{pair.man_ulid}_{moment_or_trigger}"


def decide(chat: Chat, now: datetime, silence: timedelta) -> Outcome:
    """What a chat asks for, as far as the database tells ("Цикл перевірки", steps 4 and 6).

    `ANSWERED` is to be remembered as closed; `CANDIDATE` is for Redis and the dialog API to decide on.
    """
    if chat.has_newer_mail:
        return Outcome.ANSWERED
    if now - chat.happened_at < silence:
        return Outcome.FRESH
    if chat.active_task is not None:
        return Outcome.ACTIVE_TASK
    return Outcome.CANDIDATE


def decide_all(chats: Sequence[Chat], now: datetime, silence: timedelta) -> list[PairResult]:
    """The same for many, each with the kind of its active task if it has one."""
    return [PairResult(chat, decide(chat, now, silence), chat.active_task or "") for chat in chats]


def task_id(chat: Chat) -> uuid.UUID:
    """Derived from the pair and the moment, so one activity can never have two tasks."""
    return uuid.uuid5(TASK_NAMESPACE, chat.key)


def split(operators: Sequence[str], size: int) -> list[Sequence[str]]:
    """Operators in runs of at most `size`."""
    return [operators[start : start + size] for start in range(0, len(operators), size)]
