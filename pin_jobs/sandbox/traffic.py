"""Call traffic for the sandbox: `python -m pin_jobs.sandbox.traffic`, on the database of MESSENGER_DATABASE_URL.

A pure planner says what happens to a call and when; a thin loop does it. A quarter of the calls is closed by nobody,
and now and then one is answered and both parties vanish: the work of the reaper's two phases.
"""

import heapq
import itertools
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.errors import PinJobsError
from pin_jobs.queries import load_queries

SECONDS_BETWEEN_CALLS: Final = 1.5
STALE_ANSWERED_SECONDS: Final = 2 * 3600
RECONNECT_SECONDS: Final = 2.0
_QUERIES: Final = {name: text(query) for name, query in load_queries(Path(__file__).with_name("traffic.sql")).items()}


class Fate(StrEnum):
    """What becomes of a call."""

    TALKED = "talked"
    DECLINED = "declined"
    GIVEN_UP = "given up"
    FORGOTTEN = "forgotten"
    VANISHED = "vanished"


_WEIGHTS: Final = {Fate.TALKED: 42, Fate.DECLINED: 14, Fate.GIVEN_UP: 14, Fate.FORGOTTEN: 26, Fate.VANISHED: 4}


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of traffic.sql, due `delay` seconds after its call begins."""

    delay: float
    statement: str
    parameters: Mapping[str, object]


def plan_call(rng: random.Random, fate: Fate | None = None) -> list[Step]:
    """The life of one new call, in order of time; of a random fate unless one is given."""
    fate = fate or rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    call = _new_call(rng)
    of_call = {"id": call["id"]}
    begin = Step(0, "ring", {**call, "age": 0})
    reaction = rng.uniform(2, 20)
    match fate:
        case Fate.TALKED:
            return [begin, Step(reaction, "answer", of_call), Step(reaction + rng.uniform(5, 90), "hang_up", of_call)]
        case Fate.DECLINED:
            return [begin, Step(reaction, "decline", of_call)]
        case Fate.GIVEN_UP:
            return [begin, Step(reaction, "give_up", of_call)]
        case Fate.FORGOTTEN:
            return [begin]
        case Fate.VANISHED:
            # Goes stale within the next minute, so that nobody has to wait two hours for the second phase.
            return [Step(0, "vanish", {**call, "silence": STALE_ANSWERED_SECONDS - rng.uniform(5, 55)})]


def plan_history(rng: random.Random) -> list[Step]:
    """What an empty table is given first: finished calls of the last hours, and work for the reaper's first cycle."""
    finished = [_finished_call(rng) for _ in range(40)]
    ringing = [Step(0, "ring", {**_new_call(rng), "age": rng.uniform(120, 900)}) for _ in range(12)]
    stale = [
        Step(0, "vanish", {**_new_call(rng), "silence": STALE_ANSWERED_SECONDS + rng.uniform(60, 3600)})
        for _ in range(3)
    ]
    return [*finished, *ringing, *stale]


def _finished_call(rng: random.Random) -> Step:
    talk = rng.randint(10, 900) if rng.random() < 0.7 else None
    status, reason = ("Ended", "Hangup") if talk or rng.random() < 0.5 else ("Declined", "Declined")
    return Step(
        0,
        "remember",
        {
            **_new_call(rng),
            "status": status,
            "end_reason": reason,
            "age": rng.uniform(1000, 6 * 3600),
            "lasted": rng.randint(2, 20) + (talk or 0),
            "talk": talk,
        },
    )


def _new_call(rng: random.Random) -> dict[str, object]:
    ids = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(3))
    call: dict[str, object] = dict(zip(("id", "caller", "callee"), ids, strict=True))
    return {**call, "media_type": rng.choice(("Audio", "Video"))}


class Traffic:
    """Plays planned calls on a database. `speed` compresses time: at 100 a minute of plan takes 0.6 s."""

    def __init__(self, engine: Engine, rng: random.Random, *, speed: float = 1.0) -> None:
        self._engine = engine
        self._rng = rng
        self._speed = speed
        self._numbers = itertools.count()
        self._agenda: list[tuple[float, int, Step]] = []

    def schedule(self, steps: list[Step], begin: float) -> None:
        """Put the steps of a call on the agenda; `begin` is a moment of `time.monotonic()`, in seconds."""
        for step in steps:
            heapq.heappush(self._agenda, (begin + step.delay / self._speed, next(self._numbers), step))

    def run(self, stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Play until `stopped()`; a database that goes away is waited for, with one line when it goes."""
        next_call = time.monotonic()
        prepared = away = False
        while not stopped():
            try:
                if not prepared:
                    self._prepare(time.monotonic())
                    prepared = True
                if time.monotonic() >= next_call:
                    self.schedule(plan_call(self._rng), time.monotonic())
                    next_call = time.monotonic() + self._rng.expovariate(self._speed / SECONDS_BETWEEN_CALLS)
                self._play_due(time.monotonic())
                away = False
            except OperationalError as error:
                if not away:
                    say(f"the database is away ({_first_line(error)}); trying again")
                away = True
                _sleep(RECONNECT_SECONDS, stopped)
                next_call = time.monotonic()
            _sleep(min(0.2, 0.2 / self._speed), stopped)

    def _prepare(self, now: float) -> None:
        with self._engine.connect() as connection:
            if connection.scalar(_QUERIES["is_empty"]):
                self.schedule(plan_history(self._rng), now)

    def _play_due(self, now: float) -> None:
        due: list[tuple[float, int, Step]] = []
        while self._agenda and self._agenda[0][0] <= now:
            due.append(heapq.heappop(self._agenda))
        if not due:
            return
        try:
            with self._engine.begin() as connection:
                for _, _, step in due:
                    connection.execute(_QUERIES[step.statement], dict(step.parameters))
        except DBAPIError:
            # Nothing of it was committed; the steps are for the next attempt.
            for entry in due:
                heapq.heappush(self._agenda, entry)
            raise


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]


def _sleep(seconds: float, stopped: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not stopped() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))


def main() -> int:
    """Play traffic until SIGTERM or SIGINT; the exit code."""
    stops: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        stops.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    variable = "MESSENGER_DATABASE_URL"
    try:
        url = parse_database_url(os.environ.get(variable, ""), variable=variable)
        engine = connect_to(url, application_name="pin-jobs traffic")
        Traffic(engine, random.Random()).run(lambda: bool(stops), lambda line: click.echo(line, err=True))  # noqa: S311  # calls to play with need no secrecy
    except (PinJobsError, DBAPIError) as error:
        click.echo(f"traffic: {_first_line(error) if isinstance(error, DBAPIError) else error}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
