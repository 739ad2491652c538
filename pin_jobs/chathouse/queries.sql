-- Every statement of the post-chat mail. Binds are SQLAlchemy's (:name), casts are CAST(... AS ...).
-- Names are schema-qualified: a role's search_path decides nothing here.

-- name: bound_session
-- First in every transaction. set_config(..., true) is SET LOCAL: it ends with the transaction and so reaches nobody
-- else behind a pooler. UTC and ISO: what the driver parses, whatever the role's defaults are. row_security off: a
-- row-level policy raises instead of hiding rows. lock_timeout: nobody waits long for a pair or an operator.
SELECT set_config('statement_timeout', :timeout, true), set_config('lock_timeout', :lock_timeout, true),
       set_config('idle_in_transaction_session_timeout', :timeout, true),
       set_config('client_connection_check_interval', '500ms', true), set_config('row_security', 'off', true),
       set_config('TimeZone', 'UTC', true), set_config('DateStyle', 'ISO, YMD', true)

-- name: read_clock
-- The one clock that decides.
SELECT clock_timestamp()

-- name: find_operators
-- All operators that have a runner, with what is known of their checks; a shard of them, or those that are named. The
-- rules decide who is due: a few thousand rows are cheaper than two places that know the delays.
SELECT operator_id, runner.started_at, runner.stopped_at IS NULL AS is_running,
       coalesce(profile.profiles, 0) AS profiles, checks.runner_started_at AS checked_since, checks.next_check,
       checks.last_completed, checks.requested_until, checks.lease_until
  FROM chathouse.operator_runners AS runner
  LEFT JOIN (SELECT operator_id, count(*) AS profiles FROM chathouse.ladies GROUP BY operator_id) AS profile
       USING (operator_id)
  LEFT JOIN pin_jobs.operator_checks AS checks USING (operator_id)
 WHERE (CAST(:operators AS text[]) IS NULL OR operator_id = ANY (CAST(:operators AS text[])))
   AND (hashtext(operator_id) & 2147483647) % CAST(:shards AS integer) = CAST(:shard AS integer)
 ORDER BY operator_id

-- name: mark_requested
-- A check was asked for. Compare-and-set: of two sensors that see the same operator due, one asks.
INSERT INTO pin_jobs.operator_checks AS checks (operator_id, requested_until)
SELECT operator_id, clock_timestamp() + CAST(:request_ttl AS interval)
  FROM unnest(CAST(:operators AS text[])) AS due (operator_id)
    ON CONFLICT (operator_id) DO UPDATE SET requested_until = excluded.requested_until
 WHERE (checks.requested_until IS NULL OR checks.requested_until <= clock_timestamp()
        OR checks.requested_until > clock_timestamp() + CAST(:request_ttl AS interval))
RETURNING operator_id

-- name: take_leases
-- Whoever holds an operator's lease checks it, alone; the token is looked at again in every transaction that writes.
-- Only from the state that the decision was made on: last_completed moves with every check. One further ahead than a
-- lease can be was taken before the clock was set back. In the order of the ids, as everybody takes them.
INSERT INTO pin_jobs.operator_checks AS checks (operator_id, lease_token, lease_until)
SELECT operator_id, CAST(:token AS uuid), clock_timestamp() + CAST(:lease_ttl AS interval)
  FROM unnest(CAST(:operators AS text[])) AS wanted (operator_id)
 ORDER BY operator_id
    ON CONFLICT (operator_id) DO UPDATE SET lease_token = excluded.lease_token, lease_until = excluded.lease_until
 WHERE (checks.lease_until IS NULL OR checks.lease_until <= clock_timestamp()
        OR checks.lease_until > clock_timestamp() + CAST(:lease_ttl AS interval))
   AND checks.last_completed IS NOT DISTINCT FROM
       (SELECT seen.last_completed
          FROM unnest(CAST(:operators AS text[]), CAST(:last_completed AS timestamptz[]))
               AS seen (operator_id, last_completed)
         WHERE seen.operator_id = checks.operator_id)
RETURNING operator_id

-- name: lock_lease
-- Still ours? The row stays locked until the commit, so that nobody takes the lease over in between.
SELECT operator_id
  FROM pin_jobs.operator_checks
 WHERE operator_id = ANY (CAST(:operators AS text[])) AND lease_token = CAST(:token AS uuid)
   AND lease_until > clock_timestamp()
 ORDER BY operator_id
   FOR UPDATE

-- name: complete_checks
-- The next check is due one interval from now, whatever the result. The start of the runner goes with it: a restarted
-- runner starts over.
UPDATE pin_jobs.operator_checks AS checks
   SET next_check = clock_timestamp() + CAST(:check_interval AS interval), last_completed = clock_timestamp(),
       runner_started_at = done.started_at, requested_until = NULL, lease_token = NULL, lease_until = NULL
  FROM unnest(CAST(:operators AS text[]), CAST(:started_at AS timestamptz[])) AS done (operator_id, started_at)
 WHERE checks.operator_id = done.operator_id AND checks.lease_token = CAST(:token AS uuid)
RETURNING checks.operator_id

-- name: check_off
-- By the sensor: operators that have nothing to act on. From the state that the decision was made on, and not while
-- somebody else is at work for them.
INSERT INTO pin_jobs.operator_checks AS checks (operator_id, next_check, last_completed, runner_started_at)
SELECT operator_id, clock_timestamp() + CAST(:check_interval AS interval), clock_timestamp(), started_at
  FROM unnest(CAST(:operators AS text[]), CAST(:started_at AS timestamptz[])) AS done (operator_id, started_at)
 ORDER BY operator_id
    ON CONFLICT (operator_id) DO UPDATE
   SET next_check = excluded.next_check, last_completed = excluded.last_completed,
       runner_started_at = excluded.runner_started_at, requested_until = NULL
 WHERE (checks.lease_until IS NULL OR checks.lease_until <= clock_timestamp()
        OR checks.lease_until > clock_timestamp() + CAST(:lease_ttl AS interval))
   AND checks.last_completed IS NOT DISTINCT FROM
       (SELECT seen.last_completed
          FROM unnest(CAST(:operators AS text[]), CAST(:last_completed AS timestamptz[]))
               AS seen (operator_id, last_completed)
         WHERE seen.operator_id = checks.operator_id)
RETURNING operator_id

-- name: find_unrestored
-- Of these operators, those whose runner was never checked by a run: their history is to be read first.
SELECT operator_id
  FROM pin_jobs.operator_checks
  JOIN chathouse.operator_runners AS runner USING (operator_id)
 WHERE operator_id = ANY (CAST(:operators AS text[])) AND restored_since IS DISTINCT FROM runner.started_at
 ORDER BY operator_id

-- name: restore_closed_keys
-- What the tasks of the last two months say, in both forms of key; once per runner, in the transaction that notes it
-- down. Milliseconds are cut off before they are written, so that nothing is rounded.
INSERT INTO pin_jobs.closed_tasks (key, event_at, reason)
SELECT task.lady_db_id || '_' || task.man_ulid || '_' || form.moment_or_trigger, task.event_at, 'task'
  FROM chathouse.operator_tasks AS task
 CROSS JOIN LATERAL (VALUES (task.event_trigger),
                            (to_char(date_trunc('milliseconds', task.event_at AT TIME ZONE 'UTC'),
                                     'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'))) AS form (moment_or_trigger)
 WHERE task.module = 'postChatMail' AND task.operator_id = :operator
   AND task.created_at >= clock_timestamp() - CAST(:history_window AS interval)
   AND task.event_at >= clock_timestamp() - CAST(:closed_key_ttl AS interval)
   AND task.lady_db_id IS NOT NULL AND task.man_ulid IS NOT NULL AND form.moment_or_trigger IS NOT NULL
    ON CONFLICT (key) DO NOTHING

-- name: note_restored
-- In the transaction of restore_closed_keys: for this start of the runner it is done.
UPDATE pin_jobs.operator_checks AS checks
   SET restored_since = runner.started_at
  FROM chathouse.operator_runners AS runner
 WHERE checks.operator_id = :operator AND runner.operator_id = :operator

-- name: find_open_chats
-- Per pair of these operators the newest paid activity, unless it is remembered as closed or a task of ours stands for
-- it; and what else the database has to say: a mail of the lady since, whichever operator sent it, and an active task.
-- Newest first, then everything else: while the newest is fresh, the pair is still talking.
SELECT chat.operator_id, chat.lady_db_id, chat.man_ulid, chat.lady_api_id, chat.happened_at,
       EXISTS (SELECT FROM chathouse.inmails AS mail
                WHERE mail.lady_db_id = chat.lady_db_id AND mail.man_ulid = chat.man_ulid
                  AND mail.sent_at > chat.happened_at) AS has_newer_mail,
       (SELECT task.kind
          FROM chathouse.operator_tasks AS task
         WHERE task.lady_db_id = chat.lady_db_id AND task.man_ulid = chat.man_ulid AND task.status = 'active'
           AND task.kind IN ('UnansweredMailTask', 'UnansweredMessageTask', 'NeedToWriteMailTask')
         ORDER BY task.created_at
         LIMIT 1) AS active_task
  FROM (SELECT newest.*,
               to_char(date_trunc('milliseconds', happened_at AT TIME ZONE 'UTC'),
                       'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS moment
          FROM (SELECT lady.operator_id, lady.db_id AS lady_db_id, lady.api_id AS lady_api_id, dialog.man_ulid,
                       max(activity.happened_at) AS happened_at
                  FROM chathouse.ladies AS lady
                  JOIN chathouse.dialogs AS dialog ON dialog.lady_db_id = lady.db_id
                  JOIN chathouse.chat_activity AS activity
                    ON activity.lady_ulid = lady.ulid AND activity.man_ulid = dialog.man_ulid
                 WHERE lady.operator_id = ANY (CAST(:operators AS text[]))
                   AND dialog.is_active AND dialog.is_favorite AND dialog.has_mail_limits
                   AND activity.sum > 0 AND NOT activity.is_free
                   AND activity.action = ANY (CAST(:actions AS text[]))
                   AND activity.happened_at >= clock_timestamp() - CAST(:activity_window AS interval)
                 GROUP BY lady.operator_id, lady.db_id, lady.api_id, dialog.man_ulid) AS newest) AS chat
 WHERE NOT EXISTS (SELECT FROM pin_jobs.closed_tasks AS closed
                    WHERE closed.key = chat.lady_db_id || '_' || chat.man_ulid || '_' || chat.moment)
   AND NOT EXISTS (SELECT FROM chathouse.operator_tasks AS task
                    WHERE task.lady_db_id = chat.lady_db_id AND task.man_ulid = chat.man_ulid
                      AND task.module = 'postChatMail'
                      AND (task.event_trigger = chat.moment
                           OR date_trunc('milliseconds', task.event_at) = date_trunc('milliseconds', chat.happened_at)))
 ORDER BY chat.happened_at, chat.lady_db_id, chat.man_ulid

-- name: remember_closed
-- Durable and shared, unlike the set in memory that it replaces.
INSERT INTO pin_jobs.closed_tasks (key, event_at, reason)
SELECT key, event_at, reason
  FROM unnest(CAST(:keys AS text[]), CAST(:event_at AS timestamptz[]), CAST(:reasons AS text[]))
       AS closed (key, event_at, reason)
    ON CONFLICT (key) DO NOTHING

-- name: lock_pairs
-- Between reading and writing lies an API call; from here to the commit nobody else creates a task of these pairs. In
-- the order of the locks, so that two checks never wait for each other.
SELECT pg_advisory_xact_lock(CAST(:namespace AS integer), hash)
  FROM (SELECT DISTINCT hashtext(pair) AS hash
          FROM unnest(CAST(:pairs AS text[])) AS pairs (pair)
         ORDER BY hash) AS lock

-- name: create_tasks
-- Once the pairs are locked: reads again what forbids a task (an active task, a newer mail, the key, a task for the
-- same activity, a chat that goes on), and writes the rest. The id is derived from the activity: the last line of
-- defence.
INSERT INTO chathouse.operator_tasks
       (id, kind, module, operator_id, lady_db_id, man_ulid, event_at, event_trigger, status, created_at)
SELECT wanted.id, 'NeedToWriteMailTask', 'postChatMail', :operator, wanted.lady_db_id, wanted.man_ulid,
       wanted.event_at, wanted.event_trigger, 'active', clock_timestamp()
  FROM unnest(CAST(:ids AS uuid[]), CAST(:ladies AS bigint[]), CAST(:men AS text[]), CAST(:event_at AS timestamptz[]),
              CAST(:event_triggers AS text[]), CAST(:keys AS text[]))
       AS wanted (id, lady_db_id, man_ulid, event_at, event_trigger, key)
 WHERE NOT EXISTS (SELECT FROM chathouse.operator_tasks AS task
                    WHERE task.lady_db_id = wanted.lady_db_id AND task.man_ulid = wanted.man_ulid
                      AND (task.status = 'active'
                           AND task.kind IN ('UnansweredMailTask', 'UnansweredMessageTask', 'NeedToWriteMailTask')
                           OR task.module = 'postChatMail'
                           AND (task.event_trigger = wanted.event_trigger
                                OR date_trunc('milliseconds', task.event_at)
                                   = date_trunc('milliseconds', wanted.event_at))))
   AND NOT EXISTS (SELECT FROM chathouse.inmails AS mail
                    WHERE mail.lady_db_id = wanted.lady_db_id AND mail.man_ulid = wanted.man_ulid
                      AND mail.sent_at > wanted.event_at)
   AND NOT EXISTS (SELECT FROM pin_jobs.closed_tasks AS closed WHERE closed.key = wanted.key)
   AND NOT EXISTS (SELECT FROM chathouse.chat_activity AS activity
                     JOIN chathouse.ladies AS lady ON lady.ulid = activity.lady_ulid
                    WHERE lady.db_id = wanted.lady_db_id AND activity.man_ulid = wanted.man_ulid
                      AND activity.happened_at > wanted.event_at
                      AND activity.sum > 0 AND NOT activity.is_free
                      AND activity.action = ANY (CAST(:actions AS text[])))
    ON CONFLICT (id) DO NOTHING
RETURNING id, kind, module, operator_id, lady_db_id, man_ulid, event_at, event_trigger, status, created_at

-- name: find_active_tasks
-- What the operators' stores should hold of ours.
SELECT id, kind, module, operator_id, lady_db_id, man_ulid, event_at, event_trigger, status, created_at
  FROM chathouse.operator_tasks
 WHERE operator_id = ANY (CAST(:operators AS text[])) AND module = 'postChatMail' AND status = 'active'
 ORDER BY created_at, id

-- name: read_pause
-- Until when the dialog API asked to be left alone. One further ahead than a pause can be was written before the clock
-- was set back.
SELECT until
  FROM pin_jobs.dialog_api_pause
 WHERE until > clock_timestamp() AND until <= clock_timestamp() + CAST(:longest_pause AS interval)

-- name: write_pause
-- The later one of two wins.
INSERT INTO pin_jobs.dialog_api_pause AS pause (singleton, until)
VALUES (true, clock_timestamp() + CAST(:pause AS interval))
    ON CONFLICT (singleton) DO UPDATE SET until = greatest(pause.until, excluded.until)

-- name: prune_closed_keys
-- In small batches, oldest first: longer than the activity counts, so that a pruned key cannot bring a task back.
DELETE FROM pin_jobs.closed_tasks
 WHERE key IN (SELECT key
                 FROM pin_jobs.closed_tasks
                WHERE event_at < clock_timestamp() - CAST(:closed_key_ttl AS interval)
                ORDER BY event_at
                LIMIT :batch_size)
