"""pin_jobs: a Dagster code location that closes calls nobody closed and asks for a mail after a paid chat."""
