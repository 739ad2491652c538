"""Call traffic for the sandbox: `python -m pin_jobs.sandbox.traffic`, on the database of MESSENGER_DATABASE_URL.

A pure planner says what happens to a call and when; a thin loop does it. A quarter of the calls is closed by nobody,
and now and then one is answered and both parties vanish: the work of the reaper's two phases.
"""

import random
import sys
import uuid
from enum import StrEnum
from pathlib import Path
from typing import Final

from sqlalchemy import Engine

from pin_jobs.sandbox.player import Player, Step, play

SECONDS_BETWEEN_CALLS: Final = 1.5
STALE_ANSWERED_SECONDS: Final = 2 * 3600


class Fate(StrEnum):
    """What becomes of a call."""

    TALKED = "talked"
    DECLINED = "declined"
    GIVEN_UP = "given up"
    FORGOTTEN = "forgotten"
    VANISHED = "vanished"


_WEIGHTS: Final = {Fate.TALKED: 42, Fate.DECLINED: 14, Fate.GIVEN_UP: 14, Fate.FORGOTTEN: 26, Fate.VANISHED: 4}


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


class Traffic(Player):
    """Plays calls on a database. `speed` compresses time: at 100 a minute of plan takes 0.6 s."""

    def __init__(self, engine: Engine, rng: random.Random, *, speed: float = 1.0) -> None:
        super().__init__(engine, _Calls(rng), Path(__file__).with_name("traffic.sql"), speed=speed)


class _Calls:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def beginning(self, *, is_empty: bool) -> list[Step]:
        return plan_history(self._rng) if is_empty else []

    def story(self) -> list[Step]:
        return plan_call(self._rng)

    def seconds_to_next(self) -> float:
        return self._rng.expovariate(1 / SECONDS_BETWEEN_CALLS)


if __name__ == "__main__":
    sys.exit(play("traffic", "MESSENGER_DATABASE_URL", lambda engine: Traffic(engine, random.Random())))  # noqa: S311  # calls to play with need no secrecy
