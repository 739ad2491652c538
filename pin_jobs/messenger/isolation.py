"""Poison: writes what the database takes of a batch, and finds the calls that it does not take.

A healthy batch is one part and costs two savepoint statements. A part that is rejected is undone and halved, down to
the single call: O(poison x log batch) statements.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from pin_jobs.database import DatabaseRefused
from pin_jobs.messenger.calls import Call, Transition
from pin_jobs.messenger.transaction import CycleTransaction

KEPT_BY_THE_DATABASE: Final = "the database kept the row as it was; a trigger, perhaps"
SWALLOWED_BY_THE_OUTBOX: Final = "the database swallowed its outbox row; a trigger, perhaps"

Swallowed = dict[UUID, str]
"""Ids of calls that the database dropped without an error, and what it dropped."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A call that stays as it is because of a fault of its own."""

    call: Call
    reason: str


@dataclass(slots=True)
class Settled:
    """What became of a batch: `written`, `poisoned`, or `postponed` to the next cycle for want of time."""

    written: list[Transition] = field(default_factory=list)
    poisoned: list[Poison] = field(default_factory=list)
    postponed: list[Transition] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why the database did not take a part; `swallowed` are the calls at fault where it says so without an error."""

    reason: str
    swallowed: Swallowed


def is_fault_of_a_call(sqlstate: str) -> bool:
    """Whether an error is about the data of a row, not about the database, our role or our statement.

    Data exception, integrity constraint violation, WITH CHECK OPTION violation, and RAISE EXCEPTION of a trigger.
    """
    return sqlstate[:2] in {"22", "23", "44"} or sqlstate == "P0001"


def attempt(
    transaction: CycleTransaction,
    part: Sequence[Transition],
    write: Callable[[Sequence[Transition]], Swallowed],
) -> Rejection | None:
    """Write a part; undo all of it, and say why, when the database does not take it.

    Raises:
        DatabaseUnavailable, DatabaseRefused, CycleTooLong: the fault is not a call's, and the batch is lost.
    """
    transaction.run("savepoint_part")
    try:
        swallowed = write(part)
    except DatabaseRefused as error:
        if not is_fault_of_a_call(error.sqlstate):
            raise
        rejection = Rejection(f"{error.reason} ({error.sqlstate})", {})
    else:
        if not swallowed:
            transaction.run("release_savepoint_part")
            return None
        rejection = Rejection("", swallowed)
    transaction.undo_part()
    return rejection


def write_isolated(
    transaction: CycleTransaction,
    parts: Iterable[Sequence[Transition]],
    write: Callable[[Sequence[Transition]], Swallowed],
) -> Settled:
    """Write every part; of those that are rejected, everything but the poison.

    Once something was rejected, half of the cycle's remaining time may pass. What is not settled by then is postponed,
    so that what is settled commits: a cycle full of poison gets on, however much of it there is.

    Raises:
        DatabaseUnavailable, DatabaseRefused, CycleTooLong: as `attempt`.
    """
    settled = Settled()
    give_up = transaction.elapsed + transaction.time_left / 2
    pending = [part for part in parts if part][::-1]
    is_rejecting = False
    while pending:
        part = pending.pop()
        if is_rejecting and transaction.elapsed >= give_up:
            settled.postponed.extend(part)
            continue
        rejection = attempt(transaction, part, write)
        if rejection is None:
            settled.written.extend(part)
            continue
        is_rejecting = True
        swallowed = rejection.swallowed
        settled.poisoned.extend(Poison(t.before, swallowed[t.before.id]) for t in part if t.before.id in swallowed)
        rest = [transition for transition in part if transition.before.id not in swallowed]
        if swallowed:
            pending.append(rest)
        elif len(rest) == 1:
            settled.poisoned.append(Poison(rest[0].before, rejection.reason))
        else:
            middle = len(rest) // 2
            pending += [rest[middle:], rest[:middle]]
        pending = [part for part in pending if part]
    return settled
