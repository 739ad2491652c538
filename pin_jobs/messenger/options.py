"""The options of the call timeout reaper, read from the environment and refused early."""

import difflib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Self

from pydantic import TypeAdapter, ValidationError

from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.calls import CallWindows

ENVIRONMENT_PREFIX: Final = "CALL_TIMEOUT_REAPER_"
LARGEST_BATCH: Final = 10_000

_DURATION_FORMS = re.compile(r"[0-9]+(\.[0-9]+)?|[0-9]+:[0-5][0-9]:[0-5][0-9](\.[0-9]+)?|P[0-9.A-Z]+")
_DURATION = TypeAdapter(timedelta)
_CENTURY = timedelta(days=36_500)
# Each day is a partition, and Dagster's page of them grows slow in the tens of thousands.
_EARLIEST_FIRST_DAY = date(2000, 1, 1)
# PostgreSQL keeps its timeouts as milliseconds in 31 bits: 24.8 days.
_LONGEST_TIMEOUT = timedelta(days=24)


class InvalidOption(PinJobsError):
    """An option is unknown, not of its form or out of its range; the message names variable, value and range."""


@dataclass(frozen=True, kw_only=True)
class CallTimeoutReaperOptions:
    """How the reaper works (seed: "Входная модель", "Расписание и locking"); checked on construction.

    Raises:
        InvalidOption: a value is out of its range.
    """

    ring_timeout: timedelta = timedelta(seconds=45)
    """A call that rings as long as this is Missed (INV-CALL-2)."""
    stale_answered_timeout: timedelta = timedelta(hours=2)
    """An answered call without a sign of life for as long as this is Failed."""
    polling_interval: timedelta = timedelta(seconds=15)
    """The promise: a call is closed no later than this after its deadline."""
    batch_size: int = 200
    """Calls per phase and cycle."""
    backfill_batch_size: int = 100_000
    """Calls per phase and backfill run."""
    backfill_first_day: date = date(2024, 1, 1)
    """The first day (UTC) that can be backfilled; the last one is today."""
    catch_up_batch_size: int = 5000
    """Calls per phase of a cycle that finds more than `batch_size` due."""
    lock_ttl: timedelta = timedelta(seconds=60)
    """What the server allows a cycle's transaction: past it, session, lock and uncommitted work are gone."""
    max_run_duration: timedelta = timedelta(seconds=30)
    """A cycle that takes longer rolls back."""

    def __post_init__(self) -> None:
        rules = self._rules()
        for field in fields(self):
            allowed, is_allowed = rules[field.name]
            if not is_allowed:
                value = getattr(self, field.name)
                default = " (the default)" if value == field.default else ""
                raise InvalidOption(
                    f"{ENVIRONMENT_PREFIX}{field.name.upper()} is {_written(value)}{default}; allowed is {allowed}"
                )

    def _rules(self) -> Mapping[str, tuple[str, bool]]:
        """Per option its allowed range in words, and whether its value lies in it."""
        ring, run_time = _written(self.ring_timeout), _written(self.max_run_duration)
        return {
            "ring_timeout": ("more than 0 and at most 100 years", timedelta(0) < self.ring_timeout <= _CENTURY),
            "stale_answered_timeout": (
                f"more than ring_timeout ({ring}) and at most 100 years",
                self.ring_timeout < self.stale_answered_timeout <= _CENTURY,
            ),
            "polling_interval": ("5s to 1 day", timedelta(seconds=5) <= self.polling_interval <= timedelta(days=1)),
            "batch_size": (f"1 to {LARGEST_BATCH}", 1 <= self.batch_size <= LARGEST_BATCH),
            "backfill_batch_size": ("1 to 1000000", 1 <= self.backfill_batch_size <= 1_000_000),
            "backfill_first_day": (
                f"{_EARLIEST_FIRST_DAY} to today",
                _EARLIEST_FIRST_DAY <= self.backfill_first_day <= datetime.now(UTC).date(),
            ),
            "catch_up_batch_size": (
                f"batch_size ({self.batch_size}) to 100000",
                self.batch_size <= self.catch_up_batch_size <= 100_000,
            ),
            "lock_ttl": (
                f"more than max_run_duration ({run_time}) and at most 24 days",
                self.max_run_duration < self.lock_ttl <= _LONGEST_TIMEOUT,
            ),
            "max_run_duration": ("more than 0 and less than lock_ttl", timedelta(0) < self.max_run_duration),
        }

    @property
    def windows(self) -> CallWindows:
        """The two windows of the rules."""
        return CallWindows(ring=self.ring_timeout, stale_answered=self.stale_answered_timeout)

    def in_words(self) -> dict[str, str]:
        """Every option as people write it, for the UI."""
        return {field.name: _written(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables `CALL_TIMEOUT_REAPER_*`; an empty one counts as not set.

        Durations are seconds (`45`), `00:00:45` or ISO 8601 (`PT45S`); a day is `2026-01-31`.

        Raises:
            InvalidOption: a variable is unknown, malformed or out of its range.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if variable.startswith(ENVIRONMENT_PREFIX) and text.strip():
                name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
                if name not in kinds:
                    raise InvalidOption(_unknown(variable, kinds))
                values[name] = _READERS[kinds[name]](variable, text.strip())
        return cls(**values)


def _unknown(variable: str, known: Mapping[str, type]) -> str:
    variables = [ENVIRONMENT_PREFIX + name.upper() for name in known]
    close = difflib.get_close_matches(variable, variables, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(variables)}"
    return f"{variable} is not an option of the call timeout reaper; {hint}"


def _duration(variable: str, text: str) -> timedelta:
    if _DURATION_FORMS.fullmatch(text):
        # pydantic reads 00:00:45 and PT45S itself, but seconds only as a number.
        is_seconds = text[0].isdigit() and ":" not in text
        with suppress(ValidationError, OverflowError):
            return _DURATION.validate_python(float(text) if is_seconds else text)
    raise InvalidOption(f"{variable} is {text[:40]!r}; allowed is a duration: 45, 00:00:45 or PT45S")


def _whole_number(variable: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise InvalidOption(f"{variable} is {text[:40]!r}; allowed is a whole number")
    return int(text)


def _day(variable: str, text: str) -> date:
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        with suppress(ValueError):
            return date.fromisoformat(text)
    raise InvalidOption(f"{variable} is {text[:40]!r}; allowed is a day: 2026-01-31")


_READERS: Final[Mapping[type, Callable[[str, str], Any]]] = {timedelta: _duration, int: _whole_number, date: _day}


def _written(value: object) -> str:
    if isinstance(value, timedelta):
        return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
    return str(value)
