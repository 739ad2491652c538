"""The schema `pin_jobs`: one Alembic history per database. Tables of the host are never touched."""

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from pin_jobs.database import LOCK_NAMESPACE, clear_errors, connect_to, parse_database_url
from pin_jobs.errors import PinJobsError

SCHEMA: Final = "pin_jobs"
_LOCK: Final = text(f"SELECT pg_advisory_xact_lock({LOCK_NAMESPACE}, 1000)")


class UnknownRevision(PinJobsError):
    """The schema is at a revision that this version does not know."""

    def __init__(self, name: str, revision: str) -> None:
        super().__init__(
            f"the schema {SCHEMA} of the {name} database is at revision {revision}, which this pin_jobs does "
            "not know: a newer one has migrated it, so install that one"
        )


def migrate_messenger(url: str) -> tuple[str | None, str | None]:
    """Bring the schema `pin_jobs` of the messenger database to the newest revision; return the one before and after.

    All in one transaction under an advisory lock: two at once take turns, and one that fails leaves nothing behind.

    Raises:
        InvalidDatabaseUrl, DatabaseUnavailable, DatabaseRefused, UnknownRevision: the message names the database.
    """
    return _migrate("messenger", url, variable="MESSENGER_DATABASE_URL")


def migrate_chathouse(url: str) -> tuple[str | None, str | None]:
    """The same for the chathouse database, which may be the same one.

    Raises:
        InvalidDatabaseUrl, DatabaseUnavailable, DatabaseRefused, UnknownRevision: the message names the database.
    """
    return _migrate("chathouse", url, variable="CHATHOUSE_DATABASE_URL")


def _migrate(name: str, url: str, *, variable: str) -> tuple[str | None, str | None]:
    engine = connect_to(parse_database_url(url, variable=variable), application_name="pin-jobs migrate")
    with clear_errors(name), engine.begin() as connection:
        connection.execute(_LOCK)
        # IF NOT EXISTS would ask for CREATE on the database even where an administrator has made the schema already.
        if not connection.scalar(text("SELECT to_regnamespace('pin_jobs') IS NOT NULL")):
            connection.execute(text("CREATE SCHEMA pin_jobs"))
        before = _revision(connection, name)
        config = _config(name)
        config.attributes.update(connection=connection, version_table=version_table(name))
        if before and before not in known_revisions(name):
            raise UnknownRevision(name, before)
        command.upgrade(config, "head")
        return before, _revision(connection, name)


def known_revisions(name: str) -> list[str]:
    """The revisions of a database's history that this version knows, oldest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config(name)).walk_revisions()][::-1]


def _config(name: str) -> Config:
    config = Config()
    # Percent signs are Alembic's interpolation; a path may hold one.
    config.set_main_option("script_location", str(Path(__file__).parent / name).replace("%", "%%"))
    return config


def version_table(name: str) -> str:
    """The table that holds a history's revision: both databases may be one."""
    return f"alembic_version_{name}"


def _revision(connection: Connection, name: str) -> str | None:
    options = {"version_table": version_table(name), "version_table_schema": SCHEMA}
    return MigrationContext.configure(connection, opts=options).get_current_revision()
