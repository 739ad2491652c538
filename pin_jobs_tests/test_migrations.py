from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import text

from pin_jobs.database import DatabaseRefused, DatabaseUnavailable, InvalidDatabaseUrl
from pin_jobs.errors import PinJobsError
from pin_jobs.migrations import migrate_messenger
from pin_jobs_tests.conftest import ROLE_PASSWORD
from pin_jobs_tests.factories import Messenger

HEAD = "0002"
# Whatever lies outside the schemas of PostgreSQL itself.
OBJECTS = """
    SELECT namespace.nspname || '.' || class.relname AS name
      FROM pg_class AS class JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
     WHERE namespace.nspname NOT LIKE 'pg\\_%' AND namespace.nspname <> 'information_schema'
    UNION ALL
    SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
    UNION ALL
    SELECT namespace.nspname || '.' || proname
      FROM pg_proc JOIN pg_namespace AS namespace ON namespace.oid = pronamespace
     WHERE namespace.nspname NOT LIKE 'pg\\_%' AND namespace.nspname <> 'information_schema'
     ORDER BY name
"""
# pin_jobs is a schema of ours whose name also begins with "p", so the pattern above must not hide it.
OURS = [
    "pin_jobs",
    "pin_jobs.alembic_version_messenger",
    "pin_jobs.alembic_version_messenger_pkc",
    "pin_jobs.ix_reaper_cycles_as_of",
    "pin_jobs.quarantined_calls",
    "pin_jobs.quarantined_calls_pkey",
    "pin_jobs.reaper_cycles",
    "pin_jobs.reaper_cycles_pkey",
]


@pytest.fixture
def database(empty_database):
    return Messenger(empty_database)


def objects(database):
    return [row["name"] for row in database.rows(OBJECTS)]


def as_role(server, database, role):
    return server.url(database.value("SELECT current_database()"), role=role)


class TestMigrating:
    def test_creates_the_schema_and_nothing_else(self, database):
        before = objects(database)
        assert migrate_messenger(database.url) == (None, HEAD)
        assert [name for name in objects(database) if name not in before] == OURS

    def test_again_changes_nothing(self, database):
        migrate_messenger(database.url)
        before = objects(database)
        assert migrate_messenger(database.url) == (HEAD, HEAD)
        assert objects(database) == before

    def test_keeps_what_is_recorded(self, messenger, reap):
        reap()
        before = messenger.cycles()
        migrate_messenger(messenger.url)
        assert messenger.cycles() == before

    def test_touches_no_table_of_the_host(self, database):
        database.run("CREATE SCHEMA messenger")
        database.run("CREATE TABLE messenger.call_sessions (something_else integer)")
        database.run("INSERT INTO messenger.call_sessions VALUES (1)")
        before = database.rows("SELECT xmin::text, ctid::text, * FROM messenger.call_sessions")
        migrate_messenger(database.url)
        assert database.rows("SELECT xmin::text, ctid::text, * FROM messenger.call_sessions") == before

    def test_by_eight_at_once_takes_turns(self, database):
        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(migrate_messenger, [database.url] * 8))
        assert sorted(done, key=str) == sorted([(None, HEAD)] + [(HEAD, HEAD)] * 7, key=str)

    def test_that_fails_leaves_nothing(self, database):
        # In the way of the migration's last statement.
        database.run(
            "CREATE FUNCTION public.refuse() RETURNS event_trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'no indexes here'; END $$"
        )
        database.run(
            "CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE INDEX') "
            "EXECUTE FUNCTION public.refuse()"
        )
        before = objects(database)
        with pytest.raises(DatabaseRefused, match="no indexes here"):
            migrate_messenger(database.url)
        assert objects(database) == before
        database.run("DROP EVENT TRIGGER refuse")
        assert migrate_messenger(database.url) == (None, HEAD)

    def test_is_not_misled_by_odd_defaults_of_the_role(self, server, database):
        role = server.create_role()
        name = database.value("SELECT current_database()")
        server.run(f"GRANT CREATE ON DATABASE {name} TO {role}")
        for setting in (
            "default_transaction_read_only = on",
            "default_transaction_isolation = 'serializable'",
            "search_path = 'pg_temp'",
            "client_encoding = 'SQL_ASCII'",
        ):
            server.run(f"ALTER ROLE {role} SET {setting}")
        assert migrate_messenger(as_role(server, database, role)) == (None, HEAD)
        assert [name for name in objects(database) if name.startswith("pin_jobs")] == OURS

    @pytest.mark.parametrize("prefix", ["postgres://", "postgresql://", "postgresql+psycopg2://"])
    def test_takes_any_way_of_writing_the_url(self, database, prefix):
        assert migrate_messenger(prefix + database.url.split("://", 1)[1]) == (None, HEAD)

    def test_of_a_database_that_a_newer_version_has_migrated_is_refused_in_one_line(self, database):
        migrate_messenger(database.url)
        database.run("UPDATE pin_jobs.alembic_version_messenger SET version_num = '9999'")
        with pytest.raises(PinJobsError, match="9999") as error:
            migrate_messenger(database.url)
        assert "\n" not in str(error.value)
        assert "messenger" in str(error.value)


class TestARole:
    def test_that_may_not_create_schemas_gets_one_clear_line(self, server, database):
        role = server.create_role()
        with pytest.raises(DatabaseRefused) as error:
            migrate_messenger(as_role(server, database, role))
        name = database.value("SELECT current_database()")
        assert str(error.value) == f"the messenger database refused (42501): permission denied for database {name}"
        assert ROLE_PASSWORD not in str(error.value)

    def test_that_may_only_create_in_the_schema_an_administrator_made_can_migrate(self, server, database):
        role = server.create_role()
        database.run("CREATE SCHEMA pin_jobs")
        database.run(f"GRANT USAGE, CREATE ON SCHEMA pin_jobs TO {role}")
        url = as_role(server, database, role)
        assert migrate_messenger(url) == (None, HEAD)
        assert migrate_messenger(url) == (HEAD, HEAD)

    def test_that_may_only_use_the_schema_gets_one_clear_line(self, server, database):
        role = server.create_role()
        database.run("CREATE SCHEMA pin_jobs")
        database.run(f"GRANT USAGE ON SCHEMA pin_jobs TO {role}")
        with pytest.raises(DatabaseRefused) as error:
            migrate_messenger(as_role(server, database, role))
        assert str(error.value) == "the messenger database refused (42501): permission denied for schema pin_jobs"


class TestADatabase:
    def test_that_cannot_be_reached_is_unavailable(self):
        with pytest.raises(DatabaseUnavailable) as error:
            migrate_messenger("postgresql://u:s3cr3t@127.0.0.1:1/d")
        assert "s3cr3t" not in str(error.value)

    def test_whose_url_is_none_is_refused_by_the_name_of_its_variable(self):
        with pytest.raises(InvalidDatabaseUrl, match=r"^MESSENGER_DATABASE_URL is not a PostgreSQL URL"):
            migrate_messenger("s3cr3t")

    def test_that_is_busy_migrating_is_waited_for(self, database):
        with ThreadPoolExecutor(1) as pool:
            with database.holding("SELECT pg_advisory_xact_lock(1346981450, 1000)") as other:
                waiting = pool.submit(migrate_messenger, database.url)
                with suppress(TimeoutError):
                    waiting.result(0.3)
                assert not waiting.done()
                other.execute(text("SELECT 1"))
                other.rollback()
            assert waiting.result(10) == (None, HEAD)
