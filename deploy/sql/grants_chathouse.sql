-- The role that runs post_chat_mail on the chathouse's database, with no privilege that it does not use.
--
-- Run it in that database, after `pin-jobs migrate`, as a role that may create roles and grant on both schemas; safe to
-- repeat. Then give the role a password: ALTER ROLE pin_jobs_post_chat_mail PASSWORD '...';

DO $$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'pin_jobs_post_chat_mail') THEN
    CREATE ROLE pin_jobs_post_chat_mail LOGIN NOINHERIT;
  END IF;
  EXECUTE format('GRANT CONNECT ON DATABASE %I TO pin_jobs_post_chat_mail', current_database());
END
$$;

GRANT USAGE ON SCHEMA chathouse, pin_jobs TO pin_jobs_post_chat_mail;

-- The chathouse is read, and tasks are added to it; nothing of it is changed.
GRANT SELECT (operator_id, started_at, stopped_at) ON chathouse.operator_runners TO pin_jobs_post_chat_mail;
GRANT SELECT (db_id, api_id, ulid, operator_id) ON chathouse.ladies TO pin_jobs_post_chat_mail;
GRANT SELECT (lady_db_id, man_ulid, is_active, is_favorite, has_mail_limits) ON chathouse.dialogs
   TO pin_jobs_post_chat_mail;
GRANT SELECT (lady_ulid, man_ulid, action, sum, is_free, happened_at) ON chathouse.chat_activity
   TO pin_jobs_post_chat_mail;
GRANT SELECT (lady_db_id, man_ulid, sent_at) ON chathouse.inmails TO pin_jobs_post_chat_mail;
GRANT SELECT (id, kind, module, operator_id, lady_db_id, man_ulid, event_at, event_trigger, status, created_at),
      INSERT (id, kind, module, operator_id, lady_db_id, man_ulid, event_at, event_trigger, status, created_at)
   ON chathouse.operator_tasks TO pin_jobs_post_chat_mail;

GRANT SELECT, INSERT, UPDATE ON pin_jobs.operator_checks, pin_jobs.dialog_api_pause TO pin_jobs_post_chat_mail;
GRANT SELECT, INSERT, DELETE ON pin_jobs.closed_tasks TO pin_jobs_post_chat_mail;
-- For `pin-jobs check`: is the schema at the newest revision?
GRANT SELECT ON pin_jobs.alembic_version_chathouse TO pin_jobs_post_chat_mail;
