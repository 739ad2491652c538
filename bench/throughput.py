"""How many calls does one batch close in a second?

`python -m bench.throughput`: whole cycles, committed to disk, that close everything due in one batch.
"""

import argparse
import logging
import statistics
import time
import uuid
from pathlib import Path

from bench.host import bench_server, execute, new_messenger, print_table
from pin_jobs.messenger.batch import Claim, ReapBatch
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.histories import finished_calls

# Room for the largest batch in one cycle.
OPTIONS = CallTimeoutReaperOptions(
    catch_up_batch_size=100_000,
    max_run_duration=CallTimeoutReaperOptions.max_run_duration * 10,
    lock_ttl=CallTimeoutReaperOptions.lock_ttl * 10,
)
# Half of them ring, the other half is stale.
DUE = """
    INSERT INTO messenger.call_sessions
           (id, caller_user_id, callee_user_id, media_type, status, started_at, answered_at, updated_at)
    SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'Audio', status, started_at,
           CASE status WHEN 'Answered' THEN started_at + interval '5 s' END, started_at
      FROM (SELECT CASE n % 2 WHEN 0 THEN 'Answered' ELSE 'Ringing' END AS status,
                   clock_timestamp() - interval '3 hours' - n * interval '1 ms' AS started_at
              FROM generate_series(1, {due}) AS n) AS call
"""


def close_all(messenger: Messenger) -> dict[str, float]:
    """One cycle; seconds per step and in all."""
    log = logging.getLogger("bench")
    log.disabled = True
    batch = ReapBatch(messenger.jobs_engine, OPTIONS, run_id=str(uuid.uuid4()), job_name="bench", log=log)
    began = time.perf_counter()
    claim = batch.claim()
    assert isinstance(claim, Claim)
    claimed = time.perf_counter()
    transitioned = batch.transition(claim)
    written = time.perf_counter()
    result = batch.write_outbox(transitioned)
    ended = time.perf_counter()
    assert result.missed + result.failed == len(claim.calls)
    return {
        "calls": len(claim.calls),
        "claim": claimed - began,
        "transition": written - claimed,
        "outbox": ended - written,
        "all": ended - began,
    }


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--due", type=int, nargs="+", default=[200, 5_000, 100_000], help="calls that are due")
    arguments.add_argument("--history", type=int, default=200_000, help="finished calls beside them")
    arguments.add_argument("--repeat", type=int, default=5, help="batches of each size; medians are shown")
    arguments.add_argument("--folder", type=Path, help="where to put the database")
    chosen = arguments.parse_args()
    rows: list[tuple[object, ...]] = []
    with bench_server(chosen.folder) as server:
        messenger = new_messenger(server)
        execute(messenger, finished_calls(chosen.history))
        for due in chosen.due:
            batches = []
            for _ in range(chosen.repeat):
                execute(messenger, DUE.format(due=due), "VACUUM (ANALYZE) messenger.call_sessions", "CHECKPOINT")
                batches.append(close_all(messenger))
                assert batches[-1]["calls"] == due
            median = {step: statistics.median(batch[step] for batch in batches) for step in batches[0]}
            steps = [median[step] for step in ("claim", "transition", "outbox", "all")]
            rows.append((f"{due:,}", *steps, due / median["all"]))
    print(f"one batch beside {chosen.history:,} finished calls, median of {chosen.repeat}; seconds\n")
    print_table(("due", "claim", "transition", "outbox and commit", "all", "calls a second"), rows)


if __name__ == "__main__":
    main()
