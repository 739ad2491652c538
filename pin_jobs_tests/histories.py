"""Statements that fill a messenger database with a long history and a few active calls, fast."""

from typing import Final

NO_ACTIVE_CALLS: Final = "DELETE FROM messenger.call_sessions WHERE status IN ('Ringing', 'Answered')"
# Ten calls of each phase whose next attempt has come, and ten whose has not.
QUARANTINE: Final = """
    INSERT INTO pin_jobs.quarantined_calls (call_id, phase, attempts, last_error, first_seen, next_attempt, run_id)
    SELECT id, CASE status WHEN 'Ringing' THEN 'ring_timeout' ELSE 'stale_answered' END, 3, 'a reason', now(),
           now() + CASE WHEN number % 2 = 0 THEN interval '5 min' ELSE interval '-1 s' END, 'a run'
      FROM (SELECT id, status, row_number() OVER (PARTITION BY status ORDER BY started_at) AS number
              FROM messenger.call_sessions
             WHERE status IN ('Ringing', 'Answered')) AS call
     WHERE number <= 20
"""
# As in a table that was never analyzed.
FORGET_STATISTICS: Final = """
    DO $$ BEGIN
        DELETE FROM pg_statistic WHERE starelid = 'messenger.call_sessions'::regclass;
        UPDATE pg_class SET reltuples = -1, relpages = 0, relallvisible = 0
         WHERE oid = 'messenger.call_sessions'::regclass;
    END $$
"""


def active_calls(count: int = 300, *, answered_every: int = 3) -> str:
    """That many calls, most of them due; they ring, but for every third.

    In no order of their moments, which makes the index look dear.
    """
    return f"""
        INSERT INTO messenger.call_sessions
               (id, caller_user_id, callee_user_id, media_type, status, started_at, answered_at, updated_at)
        SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'Audio', status, updated_at - lead,
               CASE status WHEN 'Answered' THEN updated_at - lead + interval '5 s' END, updated_at
          FROM (SELECT CASE n % {answered_every} WHEN 0 THEN 'Answered' ELSE 'Ringing' END AS status,
                       CASE n % {answered_every} WHEN 0 THEN interval '20 min' ELSE interval '0' END AS lead,
                       clock_timestamp() - (n * 7919 % {count}) * interval '5 hours' / {count} AS updated_at
                  FROM generate_series(1, {count}) AS n) AS call
    """


def finished_calls(count: int) -> str:
    """That many calls that are over, one every ten seconds until an hour ago."""
    return f"""
        INSERT INTO messenger.call_sessions
               (id, caller_user_id, callee_user_id, media_type, status, end_reason, started_at, answered_at, ended_at,
                duration_seconds, updated_at)
        SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'Audio',
               (ARRAY['Ended', 'Declined', 'Missed', 'Failed'])[1 + n % 4],
               (ARRAY['Hangup', 'Declined', 'Timeout', 'Error'])[1 + n % 4],
               started_at, started_at + interval '5 s', started_at + interval '65 s', 60, started_at + interval '65 s'
          FROM (SELECT n, clock_timestamp() - interval '1 hour' - ({count} - n) * interval '10 s' AS started_at
                  FROM generate_series(1, {count}) AS n) AS call
    """
