"""A worker with a clock of its own: `python -m pin_jobs_tests.scenarios.shifted_worker SECONDS`, TZ from outside.

Claims what is due on the database of MESSENGER_DATABASE_URL, looks as the sensor does, changes nothing and prints JSON.
"""

import datetime
import json
import logging
import os
import sys
import time
from typing import Any

read = time.time


def shift_clock(seconds: float) -> None:
    """Every way in which Python code asks for the time of day; to be called before the product is imported."""
    read_ns = time.time_ns
    time.time = lambda: read() + seconds
    time.time_ns = lambda: read_ns() + int(seconds * 1e9)

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    datetime.datetime = Shifted  # type: ignore[misc]  # that is the point


def main() -> None:
    shift_clock(float(sys.argv[1]))
    # ruff: noqa: PLC0415  # they must find the shifted clock
    from pin_jobs.database import connect_to, parse_database_url
    from pin_jobs.messenger import batch, sensors
    from pin_jobs.messenger.options import CallTimeoutReaperOptions

    options = CallTimeoutReaperOptions()
    url = parse_database_url(os.environ["MESSENGER_DATABASE_URL"], variable="MESSENGER_DATABASE_URL")
    engine = connect_to(url, application_name="shifted")
    probe = sensors.look_at_calls(engine, options)
    cycle = batch.ReapBatch(engine, options, run_id="shifted", job_name="shifted", log=logging.getLogger("shifted"))
    claim = cycle.claim()
    assert isinstance(claim, batch.Claim)
    decided = cycle.transition(claim)
    cycle.close()
    print(  # noqa: T201  # the answer
        json.dumps(
            {
                "ahead": [module.datetime.now(datetime.UTC).timestamp() - read() for module in (batch, sensors)],
                "hour_of_epoch": time.localtime(0).tm_hour,
                "as_of": claim.as_of.isoformat(),
                "claimed": [str(call.id) for call in claim.calls],
                "changed": [
                    [str(t.after.id), t.after.status, t.after.ended_at.isoformat()] for t in decided.transitions
                ],
                "due": probe.due,
                "next_deadline": probe.next_deadline.isoformat() if probe.next_deadline else None,
            }
        )
    )


if __name__ == "__main__":
    main()
