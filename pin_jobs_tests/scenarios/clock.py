"""The clock of one database, set by hand: cycles and looks at any moment, with all of our code as it is."""

from datetime import datetime
from typing import Final

from sqlalchemy import text

from pin_jobs_tests.factories import Database

# Functions belong to a database, PostgreSQL's own too: in this one clock_timestamp() is another from here on.
_INSTALL: Final = """
    CREATE SCHEMA set_clock;
    CREATE TABLE set_clock.reading (moment timestamptz);
    INSERT INTO set_clock.reading VALUES (clock_timestamp());
    ALTER FUNCTION pg_catalog.clock_timestamp() RENAME TO clock_of_the_machine;
    CREATE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql SECURITY DEFINER
        AS 'SELECT moment FROM set_clock.reading';
"""


class DatabaseClock:
    """Stands still until it is set; the ages of new calls of the factories count back from it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.engine.begin() as connection:
            connection.exec_driver_sql(_INSTALL)
        with database.jobs_engine.connect() as connection:
            assert connection.scalar(text("SELECT clock_timestamp()")) == self.now

    @property
    def now(self) -> datetime:
        """What it shows."""
        moment: datetime = self._database.value("SELECT moment FROM set_clock.reading")
        return moment

    def set(self, moment: datetime) -> None:
        """Turn it, forward or back, to the microsecond."""
        self._database.run("UPDATE set_clock.reading SET moment = :moment", moment=moment)
