"""The options of the post-chat mail."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

from pin_jobs.chathouse.dialogs import CheckTimes
from pin_jobs.options import Options, written

_SECOND: Final = timedelta(seconds=1)
_YEAR: Final = timedelta(days=365)


@dataclass(frozen=True, kw_only=True)
class PostChatMailOptions(Options):
    """How the post-chat mail works (seed: "Таймери", "Обмеження"); checked on construction.

    Raises:
        InvalidOption: a value is out of its range.
    """

    prefix: ClassVar = "POST_CHAT_MAIL_"
    owner: ClassVar = "the post-chat mail"

    first_check_delay: timedelta = timedelta(seconds=10)
    """From the start of a runner to its first check."""
    first_check_delay_of_many: timedelta = timedelta(seconds=30)
    """The same for an operator of more than `many_profiles`."""
    many_profiles: int = 10
    """Up to so many profiles an operator has few."""
    check_interval: timedelta = timedelta(seconds=60)
    """From the end of a check to the next one."""
    silence: timedelta = timedelta(minutes=10)
    """A chat younger than this is still going on (POST_CHAT_MAIL_MS)."""
    activity_window: timedelta = timedelta(days=60)
    """Older activity is none."""
    history_window: timedelta = timedelta(days=62)
    """How far back the first check of a runner looks for tasks that were dealt with: two months."""
    forgotten_ttl: timedelta = timedelta(minutes=10)
    """How long a dialog without mail limits is left alone."""
    request_ttl: timedelta = timedelta(seconds=60)
    """A check that was asked for and did not begin by then is asked for again."""
    lease_ttl: timedelta = timedelta(seconds=120)
    """How long a check may hold an operator."""
    operators_per_run: int = 50
    """Operators with something to act on that one run takes."""
    sensor_shards: int = 1
    """Over so many sensors the operators are spread."""
    dialog_api_timeout: timedelta = timedelta(seconds=10)
    """For one request to the dialog API."""
    dialog_api_stage_timeout: timedelta = timedelta(seconds=45)
    """For all requests of one run together; what is not asked by then is unknown, and asked at the next check."""
    dialog_api_concurrency: int = 16
    """Requests of one run at a time."""

    def rules(self) -> Mapping[str, tuple[str, bool]]:
        """Per option its allowed range in words, and whether its value lies in it."""
        day, hour = timedelta(days=1), timedelta(hours=1)
        at_most_half = self.lease_ttl / 2
        return {
            "first_check_delay": ("0s to 1 day", timedelta(0) <= self.first_check_delay <= day),
            "first_check_delay_of_many": ("0s to 1 day", timedelta(0) <= self.first_check_delay_of_many <= day),
            "many_profiles": ("0 to 1000000", 0 <= self.many_profiles <= 1_000_000),
            "check_interval": ("5s to 1 day", 5 * _SECOND <= self.check_interval <= day),
            "silence": ("0s to activity_window", timedelta(0) <= self.silence < self.activity_window),
            "activity_window": ("1 hour to 365 days", hour <= self.activity_window <= _YEAR),
            "history_window": (
                f"activity_window ({written(self.activity_window)}) to 10 years",
                self.activity_window <= self.history_window <= 10 * _YEAR,
            ),
            "forgotten_ttl": ("1s to 1 day", _SECOND <= self.forgotten_ttl <= day),
            "request_ttl": ("5s to 1 hour", 5 * _SECOND <= self.request_ttl <= hour),
            "lease_ttl": ("10s to 1 hour", 10 * _SECOND <= self.lease_ttl <= hour),
            "operators_per_run": ("1 to 1000", 1 <= self.operators_per_run <= 1000),
            "sensor_shards": ("1 to 64", 1 <= self.sensor_shards <= 64),
            "dialog_api_timeout": (
                f"more than 0 and at most dialog_api_stage_timeout ({written(self.dialog_api_stage_timeout)})",
                timedelta(0) < self.dialog_api_timeout <= self.dialog_api_stage_timeout,
            ),
            "dialog_api_stage_timeout": (
                f"more than 0 and at most half of lease_ttl ({written(at_most_half)})",
                timedelta(0) < self.dialog_api_stage_timeout <= at_most_half,
            ),
            "dialog_api_concurrency": ("1 to 256", 1 <= self.dialog_api_concurrency <= 256),
        }

    @property
    def times(self) -> CheckTimes:
        """When operators are checked."""
        return CheckTimes(
            first=self.first_check_delay,
            first_of_many=self.first_check_delay_of_many,
            many_profiles=self.many_profiles,
            interval=self.check_interval,
        )

    @property
    def closed_key_ttl(self) -> timedelta:
        """Counted from the event's moment. Longer than activity counts, so a pruned key cannot bring a task back."""
        return self.activity_window + timedelta(days=7)
