"""Chat traffic for the sandbox: `python -m pin_jobs.sandbox.chats`, on the database of CHATHOUSE_DATABASE_URL.

Five operators with their ladies, and men who write to them. Most chats are put so far back that their ten minutes of
silence end within the next minute: the work of the post-chat mail. Operators answer their tasks, and take breaks.
"""

import random
import sys
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from sqlalchemy import Engine

from pin_jobs.sandbox.player import Player, Step, play

SECONDS_BETWEEN_STORIES: Final = 4.0
SILENCE_SECONDS: Final = 600
LADIES_OF_OPERATORS: Final = {"operator-1": 3, "operator-2": 4, "operator-3": 5, "operator-4": 6, "operator-5": 12}
"""The last one has more than ten, and so a later first check."""
MEN_PER_LADY: Final = 5
_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAID: Final = ("text_message_send", "photo_message_send", "sticker_message_send", "send_gift", "watch_private_video")


@dataclass(frozen=True, slots=True)
class Pair:
    """A lady and a man who talk to each other."""

    operator_id: str
    lady_db_id: int
    lady_ulid: str
    man_ulid: str


class Story(StrEnum):
    """What may happen next."""

    ENDING_CHAT = "a chat whose silence ends soon"
    LIVE_CHAT = "a chat that goes on"
    FREE_CHAT = "a chat that costs nothing"
    MAIL = "a mail that nobody asked for"
    BREAK = "a break of an operator"
    OTHER_TASK = "a task of another module"


_WEIGHTS: Final = {
    Story.ENDING_CHAT: 58,
    Story.LIVE_CHAT: 18,
    Story.FREE_CHAT: 10,
    Story.MAIL: 8,
    Story.BREAK: 3,
    Story.OTHER_TASK: 3,
}


def plan_world() -> tuple[list[Step], list[Pair]]:
    """Ladies and their dialogs, the same at every start; a sixth of the dialogs lacks something and gets no tasks."""
    rng = random.Random("chathouse")  # noqa: S311  # people to play with need no secrecy
    steps, pairs = [], []
    number = 1000
    for operator_id, ladies in LADIES_OF_OPERATORS.items():
        for _ in range(ladies):
            number += 1
            lady = {"db_id": number, "api_id": f"lady-{number}", "ulid": _ulid(rng), "operator_id": operator_id}
            steps.append(Step(0, "add_lady", lady))
            for _ in range(MEN_PER_LADY):
                flags = [True, True, True]
                if rng.random() < 1 / 6:
                    flags[rng.randrange(3)] = False
                man = _ulid(rng)
                names = ("is_active", "is_favorite", "has_mail_limits")
                steps.append(
                    Step(
                        0, "add_dialog", {"lady_db_id": number, "man_ulid": man, **dict(zip(names, flags, strict=True))}
                    )
                )
                pairs.append(Pair(operator_id, number, str(lady["ulid"]), man))
    return steps, pairs


class Chats:
    """The script: what happens in the chathouse."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._world, self._pairs = plan_world()

    def beginning(self, *, is_empty: bool) -> list[Step]:
        """The people, runners that start now, and chats whose silence is over already: something to see at once."""
        runners = [
            Step(self._rng.uniform(0, 3), "start_runner", {"operator_id": operator}) for operator in LADIES_OF_OPERATORS
        ]
        talked = self._rng.sample(self._pairs, 30 if is_empty else 10)
        steps = [*self._world, *runners]
        for position, pair in enumerate(talked):
            age = SILENCE_SECONDS + self._rng.uniform(60, 3600)
            steps.append(self._chat(0, pair, age))
            # A third was answered meanwhile.
            if position % 3 == 2:
                steps.append(self._mail(pair, age - self._rng.uniform(10, 300)))
        return steps

    def story(self, kind: Story | None = None) -> list[Step]:
        """What happens next, of a random kind unless one is given; and an operator may answer a task beside it."""
        kind = kind or self._rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        steps = self._story(kind)
        if self._rng.random() < 0.6:
            steps.append(Step(1, "answer_task", {"id": self._number()}))
        return sorted(steps, key=lambda step: step.delay)

    def seconds_to_next(self) -> float:
        """How long until the next story begins."""
        return self._rng.expovariate(1 / SECONDS_BETWEEN_STORIES)

    def _story(self, kind: Story) -> list[Step]:
        pair = self._rng.choice(self._pairs)
        match kind:
            case Story.ENDING_CHAT:
                return [self._chat(0, pair, SILENCE_SECONDS - self._rng.uniform(5, 50))]
            case Story.LIVE_CHAT:
                return [self._chat(5 * turn, pair, 0) for turn in range(self._rng.randint(2, 6))]
            case Story.FREE_CHAT:
                # Of age already, so that only its price keeps it from becoming a task.
                return [self._chat(0, pair, SILENCE_SECONDS, is_free=True)]
            case Story.MAIL:
                return [self._mail(pair, 0)]
            case Story.BREAK:
                operator = {"operator_id": pair.operator_id}
                return [
                    Step(0, "stop_runner", operator),
                    Step(self._rng.uniform(15, 40), "start_runner", operator),
                ]
            case Story.OTHER_TASK:
                task = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
                return [Step(0, "add_task", {"id": task, **self._of(pair)})]

    def _chat(self, delay: float, pair: Pair, age: float, *, is_free: bool = False) -> Step:
        parameters = {
            "id": self._number(),
            "lady_ulid": pair.lady_ulid,
            "man_ulid": pair.man_ulid,
            "action": self._rng.choice(_PAID),
            "sum": 0 if is_free else round(self._rng.uniform(0.2, 9), 2),
            "is_free": is_free,
            "age": age,
        }
        return Step(delay, "chat", parameters)

    def _mail(self, pair: Pair, age: float) -> Step:
        return Step(0, "send_mail", {"id": self._number(), **self._of(pair), "age": age})

    def _of(self, pair: Pair) -> dict[str, object]:
        return {"operator_id": pair.operator_id, "lady_db_id": pair.lady_db_id, "man_ulid": pair.man_ulid}

    def _number(self) -> int:
        return self._rng.getrandbits(62)


class ChatTraffic(Player):
    """Plays chats on a database. `speed` compresses time: at 100 a minute of plan takes 0.6 s."""

    def __init__(self, engine: Engine, rng: random.Random, *, speed: float = 1.0) -> None:
        super().__init__(engine, Chats(rng), Path(__file__).with_name("chats.sql"), speed=speed)


def _ulid(rng: random.Random) -> str:
    return rng.choice("01234567") + "".join(rng.choices(_CROCKFORD, k=25))


if __name__ == "__main__":
    sys.exit(play("chats", "CHATHOUSE_DATABASE_URL", lambda engine: ChatTraffic(engine, random.Random())))  # noqa: S311  # chats to play with need no secrecy
