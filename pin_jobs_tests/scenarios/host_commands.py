"""What the messenger service does to a call: the commands that the reaper races with."""

from typing import Final

from sqlalchemy import Connection, text

from pin_jobs_tests.factories import StoredCall

ANSWER_CALL: Final = """
    UPDATE messenger.call_sessions
       SET status = 'Answered', answered_at = clock_timestamp(), updated_at = clock_timestamp()
     WHERE id = :id AND status = 'Ringing'
"""
END_CALL: Final = """
    UPDATE messenger.call_sessions
       SET status = 'Ended', end_reason = 'Hangup', ended_at = clock_timestamp(), updated_at = clock_timestamp(),
           duration_seconds = extract(epoch FROM clock_timestamp() - answered_at)::integer
     WHERE id = :id AND status IN ('Ringing', 'Answered')
"""
DECLINE_CALL: Final = """
    UPDATE messenger.call_sessions
       SET status = 'Declined', end_reason = 'Declined', ended_at = clock_timestamp(), updated_at = clock_timestamp()
     WHERE id = :id AND status = 'Ringing'
"""
SIGN_OF_LIFE: Final = """
    UPDATE messenger.call_sessions SET updated_at = clock_timestamp() WHERE id = :id AND status = 'Answered'
"""


def command(connection: Connection, sql: str, call: StoredCall, *, hold: str = "0s") -> bool:
    """Run a command in a transaction of its own; whether the call was still there for it.

    `hold`: for how long the transaction keeps the row before it commits.
    """
    with connection.begin():
        done = connection.execute(text(sql), {"id": call.id}).rowcount == 1
        connection.execute(text("SELECT pg_sleep_for(CAST(:hold AS interval))"), {"hold": hold})
        return done
