"""Runs that hang inside a statement of one of their ops, for tests that stop them there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pin_jobs_tests.deployment import JOB, Deployment
from pin_jobs_tests.waiting import wait_for

_KEY: Final = 4_242
_TRIGGER: Final = """
    CREATE FUNCTION public.hang() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN PERFORM {wait}; RETURN NEW; END $$;
    CREATE TRIGGER hang BEFORE {event} ON messenger.{table} FOR EACH ROW EXECUTE FUNCTION public.hang();
"""
_ON_A_LOCK: Final = f"pg_advisory_xact_lock({_KEY})"
_TABLES: Final = {"transition": ("UPDATE", "call_sessions"), "write_outbox": ("INSERT", "realtime_outbox")}
# First words of the statement that each op hangs in.
_STATEMENTS: Final = {
    "claim": "SELECT EXISTS (SELECT FROM messenger.call_sessions",
    "transition": "UPDATE messenger.call_sessions",
    "write_outbox": "INSERT INTO messenger.realtime_outbox",
}


@dataclass(frozen=True)
class BlockedSession:
    """A session of a run, on the server."""

    run_id: str
    pid: int


class Blocked:
    """The run that will hang, or does."""

    def __init__(self, host: Deployment, op: str) -> None:
        self._host = host
        self._statement = _STATEMENTS[op]

    def wait(self, timeout: float = 30) -> BlockedSession:
        """Wait until a run hangs in the op's statement."""

        def find() -> BlockedSession | None:
            for session in self._host.sessions():
                waits = session["state"] == "active" and session["wait_event_type"] in {"Lock", "Timeout"}
                if waits and session["query"].startswith(self._statement):
                    return BlockedSession(session["application_name"].removeprefix(f"{JOB}/"), session["pid"])
            return None

        return wait_for(find, timeout, f"a run to hang in {self._statement!r}")  # type: ignore[return-value]  # wait_for never returns None


@contextmanager
def run_blocked_in(op: str, host: Deployment, *, asleep: bool = False) -> Iterator[Blocked]:
    """The next run hangs in this op: behind a lock of another session or, `asleep`, in a statement that takes long.

    At the end nothing stands in the way any more.
    """
    if op == "claim":
        with host.messenger.holding("LOCK TABLE messenger.call_sessions IN ACCESS EXCLUSIVE MODE"):
            yield Blocked(host, op)
        return
    event, table = _TABLES[op]
    wait = "pg_sleep(60)" if asleep else _ON_A_LOCK
    host.messenger.run(_TRIGGER.format(wait=wait, event=event, table=table))
    try:
        with host.messenger.holding(f"SELECT {_ON_A_LOCK}"):
            yield Blocked(host, op)
    finally:
        host.messenger.run("DROP FUNCTION public.hang() CASCADE")
