-- Every statement of the call timeout reaper. Binds are SQLAlchemy's (:name), casts are CAST(... AS ...).
-- Names are schema-qualified: a role's search_path decides nothing here.

-- name: probe
-- For the sensor, outside any cycle: is anything due, and when will the next call be? One pass over the active calls
-- through the partial index; the status literals (not binds) let the planner prove that it fits.
SELECT clock_timestamp() AS now,
       count(*) FILTER (WHERE deadline <= clock_timestamp()) AS due,
       min(deadline) AS next_deadline
  FROM (SELECT started_at + CAST(:ring_timeout AS interval) AS deadline
          FROM messenger.call_sessions
         WHERE status = 'Ringing'
         UNION ALL
        SELECT coalesce(updated_at, started_at) + CAST(:stale_answered_timeout AS interval)
          FROM messenger.call_sessions
         WHERE status = 'Answered') AS active

-- name: bound_probe
-- A tick must fail in seconds, not hang until Dagster cuts it off. The rest is as in bound_session.
SELECT set_config('statement_timeout', :timeout, true), set_config('idle_in_transaction_session_timeout', :timeout, true),
       set_config('row_security', 'off', true), set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, YMD', true)

-- name: bound_session
-- The first statement of a cycle: what a worker that hangs, is stopped or is cut off can hold on to at most.
-- set_config(..., true) is SET LOCAL: it ends with the transaction and so reaches nobody else behind a pooler.
-- row_security off: a row-level policy raises instead of hiding calls. UTC and ISO: what the driver parses, whatever
-- the role's defaults are. transaction_timeout exists from PostgreSQL 17 on; CASE keeps older servers from asking. It is
-- switched off first, because a timer that runs already (a default of the role) would not be set anew.
SELECT set_config('application_name', :application_name, true),
       set_config('idle_in_transaction_session_timeout', :lock_ttl, true),
       set_config('client_connection_check_interval', '500ms', true),
       set_config('row_security', 'off', true),
       set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, YMD', true),
       set_config('statement_timeout', :lock_ttl, true),
       CASE WHEN CAST(current_setting('server_version_num') AS integer) >= 170000
            THEN set_config('transaction_timeout', '0', true) || set_config('transaction_timeout', :lock_ttl, true) END

-- name: bound_statement
-- Before each further statement: what is left of the cycle's time, so that several short statements cannot add up to
-- more, on servers that know no transaction_timeout too.
SELECT set_config('statement_timeout', :statement_timeout, true),
       set_config('idle_in_transaction_session_timeout', :idle_timeout, true)

-- name: try_run_lock
-- The transaction's own lock: it ends with the transaction whatever happens, and works behind a pooler.
SELECT pg_try_advisory_xact_lock(:namespace, :job)

-- name: find_lock_holder
-- Who holds the run lock. Another role's session may hide all but its pid from us.
SELECT holder.pid, holder.application_name, holder.xact_start AS since,
       holder.xact_start < clock_timestamp() - CAST(:lock_ttl AS interval) AS expired
  FROM pg_locks AS lock
  JOIN pg_stat_activity AS holder USING (pid)
 WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
   AND lock.classid = CAST(:namespace AS oid) AND lock.objid = CAST(:job AS oid)
   AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())

-- name: end_expired_lock_holder
-- Timeouts do not fire while the server is blocked in a write to a client that stopped reading, so the contender ends a
-- holder past its time. Looked up again in the statement that acts: the pid may belong to somebody else by now.
-- Waits up to two seconds for the session to be gone. Sessions that we may not end are left out, not an error.
SELECT holder.pid, pg_terminate_backend(holder.pid, 2000) AS ended
  FROM pg_locks AS lock
  JOIN pg_stat_activity AS holder USING (pid)
 WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2
   AND lock.classid = CAST(:namespace AS oid) AND lock.objid = CAST(:job AS oid)
   AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND holder.xact_start < clock_timestamp() - CAST(:lock_ttl AS interval)
   AND pg_has_role(current_user, holder.usesysid, 'USAGE')
   AND (SELECT NOT owner.rolsuper OR me.rolsuper
          FROM pg_roles AS owner, pg_roles AS me
         WHERE owner.oid = holder.usesysid AND me.rolname = current_user)

-- name: read_clock
-- The one clock of a cycle, read once the lock is held.
SELECT clock_timestamp()

-- name: claim_ring_timeout
-- Oldest first, at most batch_size rows locked: the limit sits above the locking in every plan, because this is a
-- statement of its own and no part of a join. Rows that answer-call or end-call holds are skipped without waiting.
SELECT id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at, end_reason,
       ended_at, duration_seconds
  FROM messenger.call_sessions
 WHERE status = 'Ringing' AND started_at <= :as_of - CAST(:ring_timeout AS interval)
 ORDER BY started_at, id
 LIMIT :batch_size
   FOR UPDATE SKIP LOCKED

-- name: claim_stale_answered
-- As claim_ring_timeout, for answered calls without a sign of life. Where a host leaves updated_at NULL, started_at
-- stands in for it: such a call would otherwise be invisible for ever.
SELECT id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at, end_reason,
       ended_at, duration_seconds
  FROM messenger.call_sessions
 WHERE status = 'Answered'
   AND coalesce(updated_at, started_at)
       <= :as_of - CAST(:stale_answered_timeout AS interval)
 ORDER BY started_at, id
 LIMIT :batch_size
   FOR UPDATE SKIP LOCKED

-- name: count_due_up_to_last_claimed
-- Per phase, how many calls are due up to the last one claimed, in claim order; all of them where the claim came out
-- short and the last one is given as NULL. What was not claimed of them is locked by somebody else.
SELECT (SELECT count(*)
          FROM messenger.call_sessions
         WHERE status = 'Ringing' AND started_at <= :as_of - CAST(:ring_timeout AS interval)
           AND (CAST(:last_ring_timeout AS uuid) IS NULL
                OR (started_at, id) <= (SELECT started_at, id FROM messenger.call_sessions
                                         WHERE id = CAST(:last_ring_timeout AS uuid)))) AS ring_timeout,
       (SELECT count(*)
          FROM messenger.call_sessions
         WHERE status = 'Answered'
           AND coalesce(updated_at, started_at) <= :as_of - CAST(:stale_answered_timeout AS interval)
           AND (CAST(:last_stale_answered AS uuid) IS NULL
                OR (started_at, id) <= (SELECT started_at, id FROM messenger.call_sessions
                                         WHERE id = CAST(:last_stale_answered AS uuid)))) AS stale_answered

-- name: transition_calls
-- The guard: a call is changed only while it still is in the status that the decision was made on (INV-CALL-3).
-- One set-based statement, not executemany: after that one the idle timeout of the server would never fire.
UPDATE messenger.call_sessions AS call
   SET status = decided.status, end_reason = decided.end_reason, ended_at = decided.ended_at,
       updated_at = decided.updated_at, duration_seconds = decided.duration_seconds
  FROM unnest(CAST(:ids AS uuid[]), CAST(:statuses_before AS text[]), CAST(:statuses AS text[]),
              CAST(:end_reasons AS text[]), CAST(:ended_at AS timestamptz[]), CAST(:updated_at AS timestamptz[]),
              CAST(:durations AS integer[]))
       AS decided (id, status_before, status, end_reason, ended_at, updated_at, duration_seconds)
 WHERE call.id = decided.id AND call.status = decided.status_before
RETURNING call.id

-- name: insert_outbox_rows
-- In the transaction of the transitions: persist, then push. An id that is there already was written by the same
-- transition of the same call, before somebody corrected its status by hand: it is left as it is.
-- unnest would flatten the targets, so they travel as JSON.
INSERT INTO messenger.realtime_outbox (id, kind, target_kind, targets, payload)
SELECT intent.id, intent.kind, intent.target_kind,
       ARRAY(SELECT jsonb_array_elements_text(CAST(intent.targets AS jsonb))), CAST(intent.payload AS jsonb)
  FROM unnest(CAST(:ids AS uuid[]), CAST(:kinds AS text[]), CAST(:target_kinds AS text[]),
              CAST(:targets AS text[]), CAST(:payloads AS text[]))
       AS intent (id, kind, target_kind, targets, payload)
    ON CONFLICT (id) DO NOTHING
RETURNING id

-- name: find_outbox_rows
-- Of the rows that the insert did not return: which are there?
SELECT id FROM messenger.realtime_outbox WHERE id = ANY (CAST(:ids AS uuid[]))

-- name: has_cycle_table
-- Closing calls must not wait for a migration; without it only the record of the cycle is missing.
SELECT to_regclass('pin_jobs.reaper_cycles') IS NOT NULL

-- name: insert_cycle
-- Part of the cycle's transaction, and so the truth about what was committed.
INSERT INTO pin_jobs.reaper_cycles
       (run_id, as_of, missed, failed, skipped_locked_ring_timeout, skipped_locked_stale_answered, poisoned)
VALUES (:run_id, :as_of, :missed, :failed, :skipped_locked_ring_timeout, :skipped_locked_stale_answered, :poisoned)

-- name: transaction_id
-- Asked for just before the commit, so that its outcome can be looked up should the answer get lost.
SELECT CAST(pg_current_xact_id() AS text)

-- name: transaction_outcome
-- 'committed', 'aborted', 'in progress', or NULL when the server no longer knows.
SELECT pg_xact_status(CAST(:transaction_id AS xid8))

-- name: find_cycle
-- Did the cycle of this run commit?
SELECT EXISTS (SELECT FROM pin_jobs.reaper_cycles WHERE run_id = :run_id)
