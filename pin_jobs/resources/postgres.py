"""A PostgreSQL database as a Dagster resource."""

from datetime import timedelta

from dagster import ConfigurableResource
from pydantic import Field
from sqlalchemy import Engine

from pin_jobs.database import connect_to, parse_database_url


class PostgresResource(ConfigurableResource[None]):
    """One of the host's databases.

    Give `url` as an `EnvVar`: Dagster shows a plain value, password and all, in the launchpad.
    """

    url: str = Field(description="PostgreSQL URL, as an EnvVar: postgresql://user:password@host:5432/database.")

    def engine(self, application_name: str, *, answer_timeout: timedelta | None = None) -> Engine:
        """A new engine without a pool; dispose of it is not needed.

        `application_name` is what `pg_stat_activity` shows, at most 63 bytes. A connection on which an answer takes
        longer than `answer_timeout` is given up.

        Raises:
            InvalidDatabaseUrl: the URL is not one of PostgreSQL.
        """
        return connect_to(
            parse_database_url(self.url, variable="the url of a PostgresResource"),
            application_name=application_name,
            answer_timeout=answer_timeout,
        )
