"""Plays what a host does to its tables: a script says what and when, a thin loop does it."""

import heapq
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import click
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.errors import PinJobsError
from pin_jobs.queries import load_queries

RECONNECT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of the script's SQL file, due `delay` seconds after its story begins."""

    delay: float
    statement: str
    parameters: Mapping[str, object]


class Script(Protocol):
    """What happens: pure plans, the same for the same source of chance."""

    def beginning(self, *, is_empty: bool) -> list[Step]:
        """What happens at every start; `is_empty`: nothing ever happened in this database."""
        ...

    def story(self) -> list[Step]:
        """What happens next, in order of time."""
        ...

    def seconds_to_next(self) -> float:
        """How long until the next story begins."""
        ...


class Player:
    """Plays a script on a database; `queries` is its SQL file, in which `is_empty` asks whether all is new.

    `speed` compresses time: at 100 a minute of plan takes 0.6 s.
    """

    def __init__(self, engine: Engine, script: Script, queries: Path, *, speed: float = 1.0) -> None:
        self._engine = engine
        self._script = script
        self._queries = {name: text(query) for name, query in load_queries(queries).items()}
        self._speed = speed
        self._numbers = itertools.count()
        self._agenda: list[tuple[float, int, Step]] = []

    def schedule(self, steps: list[Step], begin: float) -> None:
        """Put the steps of a story on the agenda; `begin` is a moment of `time.monotonic()`, in seconds."""
        for step in steps:
            heapq.heappush(self._agenda, (begin + step.delay / self._speed, next(self._numbers), step))

    def run(self, stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Play until `stopped()`; a database that goes away is waited for, with one line when it goes."""
        next_story = time.monotonic()
        prepared = away = False
        while not stopped():
            try:
                if not prepared:
                    self._prepare(time.monotonic())
                    prepared = True
                if time.monotonic() >= next_story:
                    self.schedule(self._script.story(), time.monotonic())
                    next_story = time.monotonic() + self._script.seconds_to_next() / self._speed
                self.play_due(time.monotonic())
                away = False
            except OperationalError as error:
                if not away:
                    say(f"the database is away ({_first_line(error)}); trying again")
                away = True
                _sleep(RECONNECT_SECONDS, stopped)
                next_story = time.monotonic()
            _sleep(min(0.2, 0.2 / self._speed), stopped)

    def _prepare(self, now: float) -> None:
        with self._engine.connect() as connection:
            is_empty = bool(connection.scalar(self._queries["is_empty"]))
        self.schedule(self._script.beginning(is_empty=is_empty), now)

    def play_due(self, now: float) -> None:
        """Play the steps that are due at `now`, in one transaction; all of them again the next time if it fails."""
        due: list[tuple[float, int, Step]] = []
        while self._agenda and self._agenda[0][0] <= now:
            due.append(heapq.heappop(self._agenda))
        if not due:
            return
        try:
            with self._engine.begin() as connection:
                for _, _, step in due:
                    connection.execute(self._queries[step.statement], dict(step.parameters))
        except DBAPIError:
            # Nothing of it was committed; the steps are for the next attempt.
            for entry in due:
                heapq.heappush(self._agenda, entry)
            raise


def play(name: str, variable: str, make: Callable[[Engine], Player]) -> int:
    """Play on the database that the variable names, until SIGTERM or SIGINT; the exit code."""
    stops: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        stops.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        url = parse_database_url(os.environ.get(variable, ""), variable=variable)
        engine = connect_to(url, application_name=f"pin-jobs {name}")
        make(engine).run(lambda: bool(stops), lambda line: click.echo(line, err=True))
    except (PinJobsError, DBAPIError) as error:
        click.echo(f"{name}: {_first_line(error) if isinstance(error, DBAPIError) else error}", err=True)
        return 1
    return 0


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]


def _sleep(seconds: float, stopped: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not stopped() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
