-- What `pin-jobs check` asks a chathouse database beyond the catalogue.

-- name: read_revision
-- Where `pin-jobs migrate` left the schema.
SELECT version_num FROM pin_jobs.alembic_version_chathouse
