-- The role that runs pin_jobs on the messenger's database, with no privilege that it does not use.
--
-- Run it in that database, after `pin-jobs migrate`, as a role that may create roles and grant on both schemas; safe to
-- repeat. Then give the role a password: ALTER ROLE pin_jobs_reaper PASSWORD '...';
-- Every worker connects as this role: within it, a cycle may end the session of another one that hangs.

DO $$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'pin_jobs_reaper') THEN
    CREATE ROLE pin_jobs_reaper LOGIN NOINHERIT;
  END IF;
  EXECUTE format('GRANT CONNECT ON DATABASE %I TO pin_jobs_reaper', current_database());
END
$$;

GRANT USAGE ON SCHEMA messenger, pin_jobs TO pin_jobs_reaper;

-- What a cycle reads of a call, and what it writes to one that it closes. The lock of a row needs UPDATE too.
GRANT SELECT (id, caller_user_id, callee_user_id, media_type, status, end_reason, started_at, ended_at,
              duration_seconds, updated_at),
      UPDATE (status, end_reason, ended_at, updated_at, duration_seconds)
   ON messenger.call_sessions TO pin_jobs_reaper;

-- Push intents are written; of those that are there only the id is looked at.
GRANT SELECT (id), INSERT (id, kind, target_kind, targets, payload) ON messenger.realtime_outbox TO pin_jobs_reaper;

GRANT SELECT, INSERT ON pin_jobs.reaper_cycles TO pin_jobs_reaper;
GRANT SELECT, INSERT, UPDATE, DELETE ON pin_jobs.quarantined_calls TO pin_jobs_reaper;
-- For `pin-jobs check`: is the schema at the newest revision?
GRANT SELECT ON pin_jobs.alembic_version_messenger TO pin_jobs_reaper;
