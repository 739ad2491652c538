-- What the messenger service would do to its tables, played for the sandbox. Moments are the database's own; every
-- change repeats the status in its WHERE, so that whoever comes second, the reaper or we, changes nothing. Inserts may
-- be repeated: the answer to a commit can get lost.

-- name: is_empty
SELECT NOT EXISTS (SELECT FROM messenger.call_sessions)

-- name: ring
-- `age` is for the history: seconds since the call started.
INSERT INTO messenger.call_sessions (id, caller_user_id, callee_user_id, media_type, status, started_at, updated_at)
VALUES (
    CAST(:id AS uuid), CAST(:caller AS uuid), CAST(:callee AS uuid), :media_type, 'Ringing',
    now() - make_interval(secs => :age), now() - make_interval(secs => :age)
)
ON CONFLICT (id) DO NOTHING

-- name: answer
UPDATE messenger.call_sessions
SET status = 'Answered', answered_at = now(), updated_at = now()
WHERE id = CAST(:id AS uuid) AND status = 'Ringing'

-- name: hang_up
-- Whole seconds of talk, as the messenger counts them.
UPDATE messenger.call_sessions
SET
    status = 'Ended', end_reason = 'Hangup', ended_at = now(), updated_at = now(),
    duration_seconds = CAST(extract(EPOCH FROM now() - answered_at) AS integer)
WHERE id = CAST(:id AS uuid) AND status = 'Answered'

-- name: give_up
UPDATE messenger.call_sessions
SET status = 'Ended', end_reason = 'Hangup', ended_at = now(), updated_at = now()
WHERE id = CAST(:id AS uuid) AND status = 'Ringing'

-- name: decline
UPDATE messenger.call_sessions
SET status = 'Declined', end_reason = 'Declined', ended_at = now(), updated_at = now()
WHERE id = CAST(:id AS uuid) AND status = 'Ringing'

-- name: vanish
-- A call whose parties were last heard of `silence` seconds ago, after ten minutes of talk.
INSERT INTO messenger.call_sessions (
    id, caller_user_id, callee_user_id, media_type, status, started_at, answered_at, updated_at
)
VALUES (
    CAST(:id AS uuid), CAST(:caller AS uuid), CAST(:callee AS uuid), :media_type, 'Answered',
    now() - make_interval(secs => :silence + 605), now() - make_interval(secs => :silence + 600),
    now() - make_interval(secs => :silence)
)
ON CONFLICT (id) DO NOTHING

-- name: remember
-- A finished call of the past: started `age` seconds ago, over after `lasted`; of `talk` seconds, NULL for no talk.
INSERT INTO messenger.call_sessions (
    id, caller_user_id, callee_user_id, media_type, status, end_reason, started_at, answered_at, ended_at,
    duration_seconds, updated_at
)
SELECT
    CAST(:id AS uuid), CAST(:caller AS uuid), CAST(:callee AS uuid), :media_type, :status, :end_reason, started_at,
    started_at + make_interval(secs => :lasted - CAST(:talk AS integer)),
    started_at + make_interval(secs => :lasted), CAST(:talk AS integer), started_at + make_interval(secs => :lasted)
FROM (SELECT now() - make_interval(secs => :age) AS started_at) AS call
ON CONFLICT (id) DO NOTHING
