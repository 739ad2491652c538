-- Stand-ins for the tables of the messenger service, as far as the call timeout reaper touches them.
CREATE SCHEMA IF NOT EXISTS messenger;

CREATE TABLE IF NOT EXISTS messenger.call_sessions (
    id uuid PRIMARY KEY,
    caller_user_id uuid NOT NULL,
    callee_user_id uuid NOT NULL,
    media_type text NOT NULL,
    status text NOT NULL,
    end_reason text,
    started_at timestamptz NOT NULL,
    answered_at timestamptz,
    ended_at timestamptz,
    duration_seconds integer,
    updated_at timestamptz NOT NULL
);

CREATE INDEX IF NOT EXISTS ix_call_active ON messenger.call_sessions (started_at)
WHERE status IN ('Ringing', 'Answered');

CREATE TABLE IF NOT EXISTS messenger.realtime_outbox (
    id uuid PRIMARY KEY,
    kind text NOT NULL,
    target_kind text NOT NULL,
    targets text [] NOT NULL,
    payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    dispatched_at timestamptz,
    attempts integer NOT NULL DEFAULT 0,
    last_error text
);
