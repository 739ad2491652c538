"""Operators, ladies, dialogs, chats and mails for tests; ages count back from the database's clock at the insert."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import text

from pin_jobs_tests.factories import Database, duration

_numbers = itertools.count(1)
# Not the database's: rows of two processes must not collide.
_ids = random.SystemRandom()
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_ulid() -> str:
    """A ULID: 26 characters of Crockford's alphabet, the first of them at most 7."""
    return _ids.choice("01234567") + "".join(_ids.choices(_CROCKFORD, k=25))


def new_number() -> int:
    """A bigint that no other row has."""
    return _ids.randrange(1, 2**48)


@dataclass(frozen=True, slots=True)
class Lady:
    """A profile that an operator answers for."""

    db_id: int
    api_id: str
    ulid: str
    operator_id: str


@dataclass(frozen=True, slots=True)
class Dialog:
    """A pair of a lady and a man."""

    lady: Lady
    man_ulid: str

    @property
    def lady_db_id(self) -> int:
        return self.lady.db_id

    @property
    def lady_api_id(self) -> str:
        return self.lady.api_id

    def __str__(self) -> str:
        """As keys have it."""
        return f"{self.lady.db_id}_{self.man_ulid}"


class Chathouse(Database):
    """A chathouse database of one test: what the chathouse service does to its tables, and what it would see."""

    def add_operator(
        self,
        operator_id: str | None = None,
        *,
        started: str | None = "5min",
        stopped: str | None = None,
        ladies: int = 0,
    ) -> str:
        """An operator whose runner started that long ago (`None`: it has none); with so many ladies. Its id."""
        operator_id = operator_id or f"operator-{next(_numbers)}"
        if started is not None:
            self.start_runner(operator_id, age=started)
        if stopped is not None:
            self.stop_runner(operator_id, age=stopped)
        self.add_ladies(operator_id, ladies)
        return operator_id

    def start_runner(self, operator_id: str, *, age: str = "0s") -> None:
        """Start an operator's runner, anew if it is there."""
        self.run(
            "INSERT INTO chathouse.operator_runners (operator_id, started_at) "
            "VALUES (:operator, clock_timestamp() - CAST(:age AS interval)) "
            "ON CONFLICT (operator_id) DO UPDATE SET started_at = excluded.started_at, stopped_at = NULL",
            operator=operator_id,
            age=duration(age),
        )

    def stop_runner(self, operator_id: str, *, age: str = "0s") -> None:
        self.run(
            "UPDATE chathouse.operator_runners SET stopped_at = clock_timestamp() - CAST(:age AS interval) "
            "WHERE operator_id = :operator",
            operator=operator_id,
            age=duration(age),
        )

    def add_lady(
        self, operator_id: str, *, db_id: int | None = None, api_id: str | None = None, ulid: str | None = None
    ) -> Lady:
        number = new_number() if db_id is None else db_id
        lady = Lady(number, api_id or f"lady-{number}", ulid or new_ulid(), operator_id)
        self._insert_ladies([lady])
        return lady

    def add_ladies(self, operator_id: str, count: int) -> list[Lady]:
        numbers = [new_number() for _ in range(count)]
        ladies = [Lady(number, f"lady-{number}", new_ulid(), operator_id) for number in numbers]
        self._insert_ladies(ladies)
        return ladies

    def add_dialog(
        self,
        lady: Lady,
        man_ulid: str | None = None,
        *,
        is_active: bool | None = True,
        is_favorite: bool | None = True,
        has_mail_limits: bool | None = True,
    ) -> Dialog:
        dialog = Dialog(lady, man_ulid or new_ulid())
        self._insert_dialogs([dialog], is_active, is_favorite, has_mail_limits)
        return dialog

    def add_activity(
        self,
        dialog: Dialog,
        age: str = "11min",
        *,
        action: str | None = "text_message_send",
        sum: Decimal | str | None = "1.50",  # noqa: A002  # the column's name
        is_free: bool | None = False,
        at: datetime | None = None,
    ) -> datetime:
        """What the man did in the chat, by default something that asks for a mail; its moment, `at` or `age` ago."""
        return self.add_activities([dialog], age, action=action, sum=sum, is_free=is_free, at=at)[0]

    def add_activities(
        self,
        dialogs: Sequence[Dialog],
        age: str = "11min",
        *,
        action: str | None = "text_message_send",
        sum: Decimal | str | None = "1.50",  # noqa: A002  # the column's name
        is_free: bool | None = False,
        at: datetime | None = None,
    ) -> list[datetime]:
        """The same for many dialogs in one statement; the moments in their order."""
        rows = self.rows(
            """
            INSERT INTO chathouse.chat_activity (id, lady_ulid, man_ulid, action, sum, is_free, happened_at)
            SELECT id, lady_ulid, man_ulid, CAST(:action AS text), CAST(:sum AS numeric), CAST(:is_free AS bool),
                   coalesce(CAST(:at AS timestamptz), clock_timestamp() - CAST(:age AS interval))
              FROM unnest(CAST(:ids AS bigint[]), CAST(:ladies AS text[]), CAST(:men AS text[]))
                   WITH ORDINALITY AS pair (id, lady_ulid, man_ulid, position)
             ORDER BY position
            RETURNING happened_at
            """,
            ids=[new_number() for _ in dialogs],
            ladies=[dialog.lady.ulid for dialog in dialogs],
            men=[dialog.man_ulid for dialog in dialogs],
            action=action,
            sum=None if sum is None else Decimal(sum),
            is_free=is_free,
            at=at,
            age=duration(age),
        )
        return [row["happened_at"] for row in rows]

    def add_chat(self, operator_id: str, age: str = "11min", *, lady: Lady | None = None) -> Dialog:
        """A dialog with one paid activity, that long ago: what asks for a task if nothing else forbids it."""
        return self.add_chats(operator_id, 1, age, lady=lady)[0]

    def add_chats(self, operator_id: str, count: int, age: str = "11min", *, lady: Lady | None = None) -> list[Dialog]:
        """So many such dialogs of one lady, a new one unless it is given."""
        lady = lady or self.add_lady(operator_id)
        dialogs = [Dialog(lady, new_ulid()) for _ in range(count)]
        self._insert_dialogs(dialogs, True, True, True)
        self.add_activities(dialogs, age)
        return dialogs

    def add_mail(
        self, dialog: Dialog, age: str = "0s", *, operator_id: str | None = None, at: datetime | None = None
    ) -> None:
        """A mail of the lady to the man, by her operator unless another one is named."""
        self.run(
            "INSERT INTO chathouse.inmails (id, operator_id, lady_db_id, man_ulid, sent_at) VALUES "
            "(:id, :operator, :lady, :man, "
            "coalesce(CAST(:at AS timestamptz), clock_timestamp() - CAST(:age AS interval)))",
            id=new_number(),
            operator=operator_id or dialog.lady.operator_id,
            lady=dialog.lady.db_id,
            man=dialog.man_ulid,
            at=at,
            age=duration(age),
        )

    def add_task(
        self,
        dialog: Dialog,
        kind: str = "NeedToWriteMailTask",
        *,
        module: str = "postChatMail",
        status: str = "active",
        age: str = "1min",
        event_at: datetime | None = None,
        event_trigger: str | None = None,
        operator_id: str | None = None,
    ) -> UUID:
        """A task that somebody created that long ago; closed at that moment if its status says so. Its id."""
        task_id = uuid4()
        self.run(
            """
            INSERT INTO chathouse.operator_tasks (id, kind, module, operator_id, lady_db_id, man_ulid, event_at,
                                                  event_trigger, status, created_at, closed_at)
            SELECT :id, :kind, :module, :operator, :lady, :man, coalesce(CAST(:event_at AS timestamptz), created_at),
                   CAST(:event_trigger AS text), CAST(:status AS text), created_at,
                   CASE WHEN CAST(:status AS text) = 'closed' THEN created_at END
              FROM (SELECT clock_timestamp() - CAST(:age AS interval) AS created_at) AS task
            """,
            id=task_id,
            kind=kind,
            module=module,
            operator=operator_id or dialog.lady.operator_id,
            lady=dialog.lady.db_id,
            man=dialog.man_ulid,
            event_at=event_at,
            event_trigger=event_trigger,
            status=status,
            age=duration(age),
        )
        return task_id

    def close_task(self, task_id: UUID) -> None:
        """What happens when the operator has written the mail."""
        self.run(
            "UPDATE chathouse.operator_tasks SET status = 'closed', closed_at = clock_timestamp() WHERE id = :id",
            id=task_id,
        )

    def tasks(self, dialog: Dialog | None = None) -> Sequence[Mapping[str, Any]]:
        """All tasks, or those of a pair, in the order of their creation."""
        rows = self.rows("SELECT * FROM chathouse.operator_tasks ORDER BY created_at, id")
        pair = None if dialog is None else (dialog.lady.db_id, dialog.man_ulid)
        return [row for row in rows if pair is None or (row["lady_db_id"], row["man_ulid"]) == pair]

    def _insert_ladies(self, ladies: Sequence[Lady]) -> None:
        if ladies:
            with self.engine.begin() as connection:
                connection.execute(
                    text(
                        "INSERT INTO chathouse.ladies (db_id, api_id, ulid, operator_id) "
                        "VALUES (:db_id, :api_id, :ulid, :operator_id)"
                    ),
                    [
                        {"db_id": lady.db_id, "api_id": lady.api_id, "ulid": lady.ulid, "operator_id": lady.operator_id}
                        for lady in ladies
                    ],
                )

    def _insert_dialogs(
        self, dialogs: Sequence[Dialog], is_active: bool | None, is_favorite: bool | None, has_mail_limits: bool | None
    ) -> None:
        self.run(
            "INSERT INTO chathouse.dialogs (lady_db_id, man_ulid, is_active, is_favorite, has_mail_limits) "
            "SELECT lady, man, CAST(:is_active AS bool), CAST(:is_favorite AS bool), CAST(:has_mail_limits AS bool) "
            "FROM unnest(CAST(:ladies AS bigint[]), CAST(:men AS text[])) AS pair (lady, man)",
            ladies=[dialog.lady.db_id for dialog in dialogs],
            men=[dialog.man_ulid for dialog in dialogs],
            is_active=is_active,
            is_favorite=is_favorite,
            has_mail_limits=has_mail_limits,
        )
