"""The options of the call timeout reaper."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import ClassVar, Final

from pin_jobs.messenger.calls import CallWindows
from pin_jobs.options import Options, written

LARGEST_BATCH: Final = 10_000
_CENTURY = timedelta(days=36_500)
# Each day is a partition, and Dagster's page of them grows slow in the tens of thousands.
_EARLIEST_FIRST_DAY = date(2000, 1, 1)
# PostgreSQL keeps its timeouts as milliseconds in 31 bits: 24.8 days.
_LONGEST_TIMEOUT = timedelta(days=24)


@dataclass(frozen=True, kw_only=True)
class CallTimeoutReaperOptions(Options):
    """How the reaper works (seed: "Входная модель", "Расписание и locking"); checked on construction.

    Raises:
        InvalidOption: a value is out of its range.
    """

    prefix: ClassVar = "CALL_TIMEOUT_REAPER_"
    owner: ClassVar = "the call timeout reaper"

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

    def rules(self) -> Mapping[str, tuple[str, bool]]:
        """Per option its allowed range in words, and whether its value lies in it."""
        ring, run_time = written(self.ring_timeout), written(self.max_run_duration)
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
