"""Do looks at the active calls take as long beside a long history as beside a short one, whatever the statistics?

`python -m bench.history`: the same few active calls beside a long and a short history. For every statement that reads
calls: the index it goes through, the pages it touches, and its time, long against short.
"""

import argparse
import logging
import statistics
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.host import bench_server, execute, new_messenger, print_table
from pin_jobs.messenger.batch import Claim, ReapBatch
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.sensors import look_at_calls
from pin_jobs_tests.factories import Messenger
from pin_jobs_tests.histories import FORGET_STATISTICS, NO_ACTIVE_CALLS, active_calls, finished_calls
from pin_jobs_tests.statements import plan_of, recorded, scans_of

WITHOUT_INDEXES: Final = (
    "ALTER TABLE messenger.call_sessions DROP CONSTRAINT call_sessions_pkey",
    "DROP INDEX messenger.ix_call_active",
)
WITH_INDEXES: Final = (
    "ALTER TABLE messenger.call_sessions ADD PRIMARY KEY (id)",
    "CREATE INDEX ix_call_active ON messenger.call_sessions (started_at) WHERE status IN ('Ringing', 'Answered')",
)
# How each state of the statistics comes about from the one before.
STATISTICS: Final[Mapping[str, Sequence[str]]] = {
    "only active calls": (),
    "none": (FORGET_STATISTICS,),
    "fresh": ("VACUUM (ANALYZE) messenger.call_sessions",),
    "no active call": (NO_ACTIVE_CALLS, "ANALYZE messenger.call_sessions", active_calls()),
}


@dataclass(frozen=True)
class Look:
    """What one statement took."""

    through: str
    pages: int
    milliseconds: float


def load(messenger: Messenger, history: int) -> None:
    """Statistics from when all calls were active; then the history, then other active calls."""
    execute(
        messenger,
        active_calls(answered_every=100),
        "ANALYZE messenger.call_sessions",
        *WITHOUT_INDEXES,
        finished_calls(history),
        *WITH_INDEXES,
        NO_ACTIVE_CALLS,
        active_calls(),
        "CHECKPOINT",
    )


def measure(messenger: Messenger, repeat: int) -> Mapping[str, Look]:
    """Per statement that reads calls: its plan as it was run, and the median of its times."""
    engine = messenger.jobs_engine
    options = CallTimeoutReaperOptions()
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeat):
        with recorded(engine) as statements:
            look_at_calls(engine, options)
            claim_and_let_go(engine, options)
        for statement in statements:
            times[statement.name].append(statement.seconds * 1000)
    looks = {}
    with engine.connect() as connection:
        for statement in statements:
            if "set_config(" in statement.text:
                connection.exec_driver_sql(statement.text, statement.parameters)
            elif "messenger.call_sessions" in statement.text:
                plan = plan_of(connection, statement, is_run=True)
                looks[statement.name] = Look(through(plan), pages(plan), statistics.median(times[statement.name]))
    return looks


def claim_and_let_go(engine: Any, options: CallTimeoutReaperOptions) -> None:
    """The looks of a cycle, which then closes nothing."""
    log = logging.getLogger("bench")
    log.disabled = True
    batch = ReapBatch(engine, options, run_id=str(uuid.uuid4()), job_name="bench", log=log)
    assert isinstance(batch.claim(), Claim)
    batch.close()


def through(plan: Mapping[str, Any]) -> str:
    """The ways on which a plan reads calls."""
    return ", ".join(
        sorted({scan.index or scan.node.upper() for scan in scans_of(plan) if scan.table == "call_sessions"})
    )


def pages(plan: Mapping[str, Any]) -> int:
    """Pages touched, in memory or on disk."""
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--long", type=int, default=5_000_000, help="finished calls of the long history")
    arguments.add_argument("--short", type=int, default=5_000, help="finished calls of the short history")
    arguments.add_argument("--repeat", type=int, default=25, help="times that each statement is run")
    arguments.add_argument("--folder", type=Path, help="where to put the database: 2 GB for five million calls")
    chosen = arguments.parse_args()
    rows: list[tuple[object, ...]] = []
    with bench_server(chosen.folder) as server:
        long, short = new_messenger(server), new_messenger(server)
        load(long, chosen.long)
        load(short, chosen.short)
        for name, way in STATISTICS.items():
            for messenger in (long, short):
                execute(messenger, *way)
            # The short one again afterwards: a machine that grew busy would show.
            of_short, of_long = measure(short, chosen.repeat), measure(long, chosen.repeat)
            for statement, look in of_long.items():
                other = of_short[statement]
                rows.append(
                    (
                        name,
                        statement,
                        look.through,
                        other.pages,
                        look.pages,
                        other.milliseconds,
                        look.milliseconds,
                        look.milliseconds / other.milliseconds,
                    )
                )
    print(f"300 active calls beside {chosen.long:,} finished ones (long) and {chosen.short:,} (short)\n")
    print_table(
        ("statistics", "statement", "long: through", "pages, short", "long", "ms, short", "long", "ratio"), rows
    )


if __name__ == "__main__":
    main()
