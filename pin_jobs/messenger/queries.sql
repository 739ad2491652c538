-- Every statement of the call timeout reaper. Binds are SQLAlchemy's (:name), casts are CAST(... AS ...).
-- Names are schema-qualified or PostgreSQL's own (see connect_to): a role's search_path decides nothing here.

-- name: probe
-- For the sensor, outside any cycle: is anything due, and when will the next call be? One pass over the active calls
-- through the partial index; the status literals (not binds) let the planner prove that it fits. A call in quarantine
-- is due at its next attempt. One further ahead than any delay was written before the clock was set back: it counts as
-- due.
SELECT clock_timestamp() AS now,
       count(*) FILTER (WHERE attempt_at <= clock_timestamp()) AS due,
       min(attempt_at) AS next_deadline
  FROM (SELECT id, 'ring_timeout' AS phase, started_at + CAST(:ring_timeout AS interval) AS deadline
          FROM messenger.call_sessions
         WHERE status = 'Ringing'
         UNION ALL
        SELECT id, 'stale_answered', coalesce(updated_at, started_at) + CAST(:stale_answered_timeout AS interval)
          FROM messenger.call_sessions
         WHERE status = 'Answered') AS active
  LEFT JOIN pin_jobs.quarantined_calls AS quarantined
    ON quarantined.call_id = active.id AND quarantined.phase = active.phase
 CROSS JOIN LATERAL
       (SELECT CASE WHEN quarantined.next_attempt <= clock_timestamp() + CAST(:longest_delay AS interval)
                    THEN greatest(deadline, quarantined.next_attempt) ELSE deadline END AS attempt_at) AS attempt

-- name: bound_probe
-- A tick must fail in seconds, not hang until Dagster cuts it off. The rest is as in bound_session.
SELECT set_config('statement_timeout', :timeout, true),
       set_config('idle_in_transaction_session_timeout', :timeout, true),
       set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),
       set_config('row_security', 'off', true), set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, YMD', true),
       to_regclass('pin_jobs.quarantined_calls') IS NOT NULL AS has_schema

-- name: bound_session
-- The first statement of a cycle: what a worker that hangs, is stopped or is cut off can hold on to at most.
-- set_config(..., true) is SET LOCAL: it ends with the transaction and so reaches nobody else behind a pooler.
-- row_security off: a row-level policy raises instead of hiding calls. UTC and ISO: what the driver parses, whatever
-- the role's defaults are. transaction_timeout exists from PostgreSQL 17 on; CASE keeps older servers from asking. It
-- is switched off first, because a timer that runs already (a default of the role) would not be set anew.
-- enable_seqscan: by statistics from a time when most calls were active, the planner would read all calls instead of the
-- partial index. jit: without statistics it would compile statements, which takes twenty times as long as running them.
-- has_schema: the newest table of ours stands for all. Closing calls must not wait for a migration.
SELECT set_config('application_name', :application_name, true),
       set_config('idle_in_transaction_session_timeout', :lock_ttl, true),
       set_config('client_connection_check_interval', '500ms', true),
       set_config('row_security', 'off', true),
       set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, YMD', true),
       set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),
       set_config('statement_timeout', :lock_ttl, true),
       CASE WHEN CAST(current_setting('server_version_num') AS integer) >= 170000
            THEN set_config('transaction_timeout', '0', true) || set_config('transaction_timeout', :lock_ttl, true) END,
       to_regclass('pin_jobs.quarantined_calls') IS NOT NULL AS has_schema

-- name: bound_statement
-- Before further statements, as time goes by: what is left of the cycle's time, so that several short statements cannot
-- add up to more, on servers that know no transaction_timeout too.
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

-- name: find_backlog
-- Before the claim, per phase: are more healthy calls due than an ordinary batch takes? Looks at one more than that, in
-- the order of the partial index: without one the planner may prefer all of another index.
SELECT EXISTS (SELECT FROM messenger.call_sessions AS call
                WHERE status = 'Ringing' AND started_at <= :as_of - CAST(:ring_timeout AS interval)
                  AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
                  AND NOT EXISTS (SELECT FROM pin_jobs.quarantined_calls AS quarantined
                                   WHERE quarantined.call_id = call.id AND quarantined.phase = 'ring_timeout')
                ORDER BY started_at
               OFFSET :batch_size) AS ring_timeout,
       EXISTS (SELECT FROM messenger.call_sessions AS call
                WHERE status = 'Answered'
                  AND coalesce(updated_at, started_at) <= :as_of - CAST(:stale_answered_timeout AS interval)
                  AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
                  AND NOT EXISTS (SELECT FROM pin_jobs.quarantined_calls AS quarantined
                                   WHERE quarantined.call_id = call.id AND quarantined.phase = 'stale_answered')
                ORDER BY started_at
               OFFSET :batch_size) AS stale_answered

-- name: count_quarantine
-- Per phase, the due calls in quarantine: those to be tried again now (as claim_ring_timeout_retries says), and those
-- that wait.
SELECT phase, count(*) FILTER (WHERE is_retry) AS retries, count(*) FILTER (WHERE NOT is_retry) AS waiting
  FROM (SELECT quarantined.phase,
               next_attempt <= :as_of OR next_attempt > :as_of + CAST(:longest_delay AS interval) AS is_retry
          FROM pin_jobs.quarantined_calls AS quarantined
          JOIN messenger.call_sessions AS call ON call.id = quarantined.call_id
         WHERE CASE quarantined.phase
               WHEN 'ring_timeout'
               THEN status = 'Ringing' AND started_at <= :as_of - CAST(:ring_timeout AS interval)
               ELSE status = 'Answered'
                    AND coalesce(updated_at, started_at) <= :as_of - CAST(:stale_answered_timeout AS interval) END
           AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)) AS due
 GROUP BY phase

-- name: claim_ring_timeout
-- Oldest first, at most batch_size rows locked: the limit sits above the locking in every plan, because this is a
-- statement of its own. Rows that answer-call or end-call holds are skipped without waiting. Calls in quarantine are
-- claimed apart, after the healthy ones. first and last: the day that a backfill closes.
SELECT id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at, end_reason,
       ended_at, duration_seconds
  FROM messenger.call_sessions AS call
 WHERE status = 'Ringing' AND started_at <= :as_of - CAST(:ring_timeout AS interval)
   AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND NOT EXISTS (SELECT FROM pin_jobs.quarantined_calls AS quarantined
                    WHERE quarantined.call_id = call.id AND quarantined.phase = 'ring_timeout')
 ORDER BY started_at, id
 LIMIT :batch_size
   FOR UPDATE OF call SKIP LOCKED

-- name: claim_stale_answered
-- As claim_ring_timeout, for answered calls without a sign of life. Where a host leaves updated_at NULL, started_at
-- stands in for it: such a call would otherwise be invisible for ever.
SELECT id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at, end_reason,
       ended_at, duration_seconds
  FROM messenger.call_sessions AS call
 WHERE status = 'Answered'
   AND coalesce(updated_at, started_at) <= :as_of - CAST(:stale_answered_timeout AS interval)
   AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND NOT EXISTS (SELECT FROM pin_jobs.quarantined_calls AS quarantined
                    WHERE quarantined.call_id = call.id AND quarantined.phase = 'stale_answered')
 ORDER BY started_at, id
 LIMIT :batch_size
   FOR UPDATE OF call SKIP LOCKED

-- name: claim_ring_timeout_retries
-- Calls in quarantine that are due for another attempt, those that wait longest first. A next attempt further ahead
-- than any delay was written before the clock was set back, and counts as due.
SELECT call.id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at, end_reason,
       ended_at, duration_seconds, quarantined.attempts
  FROM messenger.call_sessions AS call
  JOIN pin_jobs.quarantined_calls AS quarantined
    ON quarantined.call_id = call.id AND quarantined.phase = 'ring_timeout'
 WHERE status = 'Ringing' AND started_at <= :as_of - CAST(:ring_timeout AS interval)
   AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND (next_attempt <= :as_of OR next_attempt > :as_of + CAST(:longest_delay AS interval))
 ORDER BY next_attempt, call.id
 LIMIT :batch_size
   FOR UPDATE OF call SKIP LOCKED


-- name: claim_stale_answered_retries
-- As claim_ring_timeout_retries, for answered calls without a sign of life.
SELECT call.id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at, end_reason,
       ended_at, duration_seconds, quarantined.attempts
  FROM messenger.call_sessions AS call
  JOIN pin_jobs.quarantined_calls AS quarantined
    ON quarantined.call_id = call.id AND quarantined.phase = 'stale_answered'
 WHERE status = 'Answered'
   AND coalesce(updated_at, started_at) <= :as_of - CAST(:stale_answered_timeout AS interval)
   AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND (next_attempt <= :as_of OR next_attempt > :as_of + CAST(:longest_delay AS interval))
 ORDER BY next_attempt, call.id
 LIMIT :batch_size
   FOR UPDATE OF call SKIP LOCKED

-- name: count_due
-- Per phase, how many healthy calls are due in all, and how many up to the last one claimed, in claim order (where the
-- claim came out short, that one is given as NULL, and it is all of them). Of the latter, what was not claimed is
-- locked by somebody else; what comes after is left to the next cycle.
SELECT count(*) FILTER (WHERE phase = 'ring_timeout') AS ring_timeout,
       count(*) FILTER (WHERE phase = 'ring_timeout' AND up_to_last) AS ring_timeout_up_to_last,
       count(*) FILTER (WHERE phase = 'stale_answered') AS stale_answered,
       count(*) FILTER (WHERE phase = 'stale_answered' AND up_to_last) AS stale_answered_up_to_last
  FROM (SELECT id, 'ring_timeout' AS phase,
               CAST(:last_ring_timeout AS uuid) IS NULL
               OR (started_at, id) <= (SELECT started_at, id FROM messenger.call_sessions
                                        WHERE id = CAST(:last_ring_timeout AS uuid)) AS up_to_last
          FROM messenger.call_sessions
         WHERE status = 'Ringing' AND started_at <= :as_of - CAST(:ring_timeout AS interval)
           AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
         UNION ALL
        SELECT id, 'stale_answered',
               CAST(:last_stale_answered AS uuid) IS NULL
               OR (started_at, id) <= (SELECT started_at, id FROM messenger.call_sessions
                                        WHERE id = CAST(:last_stale_answered AS uuid))
          FROM messenger.call_sessions
         WHERE status = 'Answered'
           AND coalesce(updated_at, started_at) <= :as_of - CAST(:stale_answered_timeout AS interval)
           AND started_at BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)) AS due
 WHERE NOT EXISTS (SELECT FROM pin_jobs.quarantined_calls AS quarantined
                    WHERE quarantined.call_id = due.id AND quarantined.phase = due.phase)

-- name: plan_as_usual
-- Before the first write: triggers of the host run in it, and get the plans that they are used to. NULL is the session's
-- default.
SELECT set_config('enable_seqscan', NULL, true), set_config('jit', NULL, true)

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

-- name: check_constraints
-- What the host deferred to the commit is checked here, where one call can still be taken out of the batch.
SET CONSTRAINTS ALL IMMEDIATE

-- name: defer_constraints
-- For the next part of a batch that is written in parts: a constraint may want call and outbox row together.
SET CONSTRAINTS ALL DEFERRED

-- name: savepoint_batch
-- Before the first write: where a batch goes back to that turns out to hold poison only with its outbox rows.
SAVEPOINT batch

-- name: roll_back_to_savepoint_batch
-- All calls of the batch are as they were, and still locked.
ROLLBACK TO SAVEPOINT batch

-- name: savepoint_part
-- Around each part of a batch that stands or falls as one.
SAVEPOINT part

-- name: roll_back_to_savepoint_part
-- RELEASE after it, else a batch written in many parts would nest them ever deeper.
ROLLBACK TO SAVEPOINT part

-- name: release_savepoint_part
-- The part stays written.
RELEASE SAVEPOINT part

-- name: quarantine_calls
-- Calls that this cycle could not close. It holds the lock of the call, so nobody else writes the same row.
INSERT INTO pin_jobs.quarantined_calls AS quarantined
       (call_id, phase, attempts, last_error, first_seen, next_attempt, run_id)
SELECT poison.call_id, poison.phase, poison.attempts, poison.last_error, :as_of, poison.next_attempt, :run_id
  FROM unnest(CAST(:ids AS uuid[]), CAST(:phases AS text[]), CAST(:attempts AS integer[]), CAST(:errors AS text[]),
              CAST(:next_attempts AS timestamptz[])) AS poison (call_id, phase, attempts, last_error, next_attempt)
    ON CONFLICT (call_id, phase) DO UPDATE
   SET attempts = excluded.attempts, last_error = excluded.last_error, next_attempt = excluded.next_attempt,
       run_id = excluded.run_id

-- name: clear_quarantine
-- Calls that left their phase, by this cycle or by anybody else. A row that another transaction holds is left to that
-- one: a cycle never waits for a backfill.
DELETE FROM pin_jobs.quarantined_calls AS quarantined
 USING (SELECT call_id, phase
          FROM pin_jobs.quarantined_calls
         WHERE NOT EXISTS (SELECT FROM messenger.call_sessions AS call
                            WHERE call.id = call_id
                              AND call.status = CASE phase WHEN 'ring_timeout' THEN 'Ringing' ELSE 'Answered' END)
           FOR UPDATE SKIP LOCKED) AS gone
 WHERE quarantined.call_id = gone.call_id AND quarantined.phase = gone.phase

-- name: list_quarantine
-- Those that left their phase are left out: the next cycle removes them.
SELECT call_id, phase, attempts, last_error, first_seen, next_attempt, run_id
  FROM pin_jobs.quarantined_calls
 WHERE EXISTS (SELECT FROM messenger.call_sessions AS call
                WHERE call.id = call_id
                  AND call.status = CASE phase WHEN 'ring_timeout' THEN 'Ringing' ELSE 'Answered' END)
 ORDER BY first_seen, call_id
 LIMIT :at_most

-- name: release_all_from_quarantine
-- By hand: the next cycle takes the calls like any other.
DELETE FROM pin_jobs.quarantined_calls RETURNING call_id

-- name: release_from_quarantine
-- By hand, these calls only.
DELETE FROM pin_jobs.quarantined_calls WHERE call_id = ANY (CAST(:ids AS uuid[])) RETURNING call_id

-- name: insert_cycle
-- Part of the cycle's transaction, and so the truth about what was committed.
INSERT INTO pin_jobs.reaper_cycles
       (run_id, as_of, missed, failed, skipped_locked_ring_timeout, skipped_locked_stale_answered, poisoned, partition)
VALUES (:run_id, :as_of, :missed, :failed, :skipped_locked_ring_timeout, :skipped_locked_stale_answered, :poisoned,
        :partition)

-- name: transaction_id
-- Asked for just before the commit, so that its outcome can be looked up should the answer get lost.
SELECT CAST(pg_current_xact_id() AS text)

-- name: transaction_outcome
-- 'committed', 'aborted', 'in progress', or NULL when the server no longer knows.
SELECT pg_xact_status(CAST(:transaction_id AS xid8))

-- name: find_cycle
-- Did the cycle of this run commit?
SELECT EXISTS (SELECT FROM pin_jobs.reaper_cycles WHERE run_id = :run_id)
