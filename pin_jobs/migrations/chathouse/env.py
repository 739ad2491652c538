"""Alembic's entry: runs the history on the connection and in the transaction that `pin_jobs.migrations` opened."""

from alembic import context

from pin_jobs.migrations import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    version_table=context.config.attributes["version_table"],
    version_table_schema=SCHEMA,
)
context.run_migrations()
