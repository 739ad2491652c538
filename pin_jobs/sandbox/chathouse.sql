-- Stand-ins for the tables of the chathouse service, as far as the post-chat mail touches them.
CREATE SCHEMA IF NOT EXISTS chathouse;

CREATE TABLE IF NOT EXISTS chathouse.operator_runners (
    operator_id text PRIMARY KEY,
    started_at timestamptz NOT NULL,
    stopped_at timestamptz
);

CREATE TABLE IF NOT EXISTS chathouse.ladies (
    db_id bigint PRIMARY KEY,
    api_id text UNIQUE NOT NULL,
    ulid char(26) UNIQUE NOT NULL,
    operator_id text NOT NULL
);

CREATE INDEX IF NOT EXISTS ix_ladies_operator ON chathouse.ladies (operator_id);

CREATE TABLE IF NOT EXISTS chathouse.dialogs (
    lady_db_id bigint,
    man_ulid char(26),
    is_active bool,
    is_favorite bool,
    has_mail_limits bool,
    PRIMARY KEY (lady_db_id, man_ulid)
);

CREATE TABLE IF NOT EXISTS chathouse.chat_activity (
    id bigint PRIMARY KEY,
    lady_ulid char(26),
    man_ulid char(26),
    action text,
    sum numeric(12, 2),
    is_free bool,
    happened_at timestamptz
);

CREATE INDEX IF NOT EXISTS ix_chat_activity_pair ON chathouse.chat_activity (lady_ulid, man_ulid, happened_at DESC);

CREATE TABLE IF NOT EXISTS chathouse.inmails (
    id bigint PRIMARY KEY,
    operator_id text,
    lady_db_id bigint,
    man_ulid char(26),
    sent_at timestamptz
);

CREATE INDEX IF NOT EXISTS ix_inmails_pair ON chathouse.inmails (lady_db_id, man_ulid, sent_at DESC);

CREATE TABLE IF NOT EXISTS chathouse.operator_tasks (
    id uuid PRIMARY KEY,
    kind text,
    module text,
    operator_id text,
    lady_db_id bigint,
    man_ulid char(26),
    event_at timestamptz,
    event_trigger text,
    status text,
    created_at timestamptz,
    closed_at timestamptz
);

CREATE INDEX IF NOT EXISTS ix_operator_tasks_pair ON chathouse.operator_tasks (lady_db_id, man_ulid, status);

CREATE INDEX IF NOT EXISTS ix_operator_tasks_operator ON chathouse.operator_tasks (operator_id, status);
