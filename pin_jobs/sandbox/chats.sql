-- What the chathouse service would do to its tables, played for the sandbox. Moments are the database's own, `age` counts
-- back from now in seconds. Statements may be repeated: the answer to a commit can get lost.

-- name: is_empty
SELECT NOT EXISTS (SELECT FROM chathouse.ladies)

-- name: add_lady
INSERT INTO chathouse.ladies (db_id, api_id, ulid, operator_id)
VALUES (:db_id, :api_id, :ulid, :operator_id)
ON CONFLICT DO NOTHING

-- name: add_dialog
INSERT INTO chathouse.dialogs (lady_db_id, man_ulid, is_active, is_favorite, has_mail_limits)
VALUES (:lady_db_id, :man_ulid, :is_active, :is_favorite, :has_mail_limits)
ON CONFLICT DO NOTHING

-- name: start_runner
INSERT INTO chathouse.operator_runners (operator_id, started_at)
VALUES (:operator_id, now())
ON CONFLICT (operator_id) DO UPDATE SET started_at = excluded.started_at, stopped_at = NULL

-- name: stop_runner
UPDATE chathouse.operator_runners SET stopped_at = now()
WHERE operator_id = :operator_id AND stopped_at IS NULL

-- name: chat
INSERT INTO chathouse.chat_activity (id, lady_ulid, man_ulid, action, sum, is_free, happened_at)
VALUES (:id, :lady_ulid, :man_ulid, :action, :sum, :is_free, now() - make_interval(secs => :age))
ON CONFLICT DO NOTHING

-- name: send_mail
INSERT INTO chathouse.inmails (id, operator_id, lady_db_id, man_ulid, sent_at)
VALUES (:id, :operator_id, :lady_db_id, :man_ulid, now() - make_interval(secs => :age))
ON CONFLICT DO NOTHING

-- name: add_task
-- Of another module, which the post-chat mail has to respect.
INSERT INTO chathouse.operator_tasks (
    id, kind, module, operator_id, lady_db_id, man_ulid, event_at, event_trigger, status, created_at
)
VALUES (
    CAST(:id AS uuid), 'UnansweredMailTask', 'unansweredMail', :operator_id, :lady_db_id, :man_ulid, now(), :id,
    'active', now()
)
ON CONFLICT DO NOTHING

-- name: answer_task
-- The operator writes the mail that the oldest task asks for, once it has been there for as long as reading takes. Once
-- for each id of a mail, whatever happens to the answer of the commit.
WITH task AS (
    UPDATE chathouse.operator_tasks SET status = 'closed', closed_at = now()
    WHERE
        id = (
            SELECT id FROM chathouse.operator_tasks
            WHERE status = 'active' AND created_at < now() - make_interval(secs => 20)
            ORDER BY created_at
            LIMIT 1
            FOR UPDATE SKIP LOCKED
        )
        AND status = 'active'
        AND NOT EXISTS (SELECT FROM chathouse.inmails AS mail WHERE mail.id = :id)
    RETURNING operator_id, lady_db_id, man_ulid
)

INSERT INTO chathouse.inmails (id, operator_id, lady_db_id, man_ulid, sent_at)
SELECT
    :id,
    operator_id,
    lady_db_id,
    man_ulid,
    now()
FROM task
