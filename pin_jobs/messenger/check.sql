-- What `pin-jobs check` asks a messenger database beyond the catalogue.

-- name: read_revision
-- Where `pin-jobs migrate` left the schema.
SELECT version_num FROM pin_jobs.alembic_version_messenger

-- name: avoid_seq_scans
-- For the plans that follow: on a small table the planner would rightly read all of it, and we want to know whether it
-- could use the index on a large one.
SELECT set_config('enable_seqscan', 'off', true)
