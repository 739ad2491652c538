import signal
import socket
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from pin_jobs.database import (
    DatabaseRefused,
    DatabaseUnavailable,
    InvalidDatabaseUrl,
    clear_errors,
    connect_to,
    parse_database_url,
)
from pin_jobs.errors import PinJobsError
from pin_jobs_tests.factories import a_ringing_call
from pin_jobs_tests.proxy import Breakpoint, Side
from pin_jobs_tests.waiting import wait_for

FORM = (
    "THE_VARIABLE is not a PostgreSQL URL; its form is postgresql://user:password@host:5432/database, "
    "with special characters of the password percent-encoded (@ is %40)"
)


def open_engine(url: str):
    return connect_to(parse_database_url(url, variable="THE_VARIABLE"), application_name="test_database")


def failure(url: str, sql: str = "SELECT 1") -> PinJobsError:
    with pytest.raises(PinJobsError) as error, clear_errors("messenger"), open_engine(url).connect() as connection:
        connection.execute(text(sql))
    assert "\n" not in str(error.value)
    return error.value


class TestAUrl:
    @pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
    @pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+psycopg2"])
    def test_of_postgresql_is_read_for_the_driver_that_is_wanted(self, scheme, driver):
        url = parse_database_url(
            f"{scheme}://u:p%40ss@db.example:5433/calls?sslmode=require", variable="X", driver=driver
        )
        assert url.drivername == driver
        assert (url.username, url.password, url.host, url.port) == ("u", "p@ss", "db.example", 5433)
        assert (url.database, dict(url.query)) == ("calls", {"sslmode": "require"})

    def test_is_read_for_our_own_driver_unless_told_otherwise(self):
        assert parse_database_url("postgres://h/d", variable="X").drivername == "postgresql+psycopg"

    def test_may_name_a_unix_socket(self):
        url = parse_database_url("postgresql://u@/d?host=/run/postgresql", variable="X")
        assert (url.host, url.query["host"]) == (None, "/run/postgresql")

    def test_may_have_space_around_it(self):
        assert parse_database_url(" postgres://h/d\n", variable="X").database == "d"

    def test_may_hold_the_scheme_in_its_password(self):
        assert parse_database_url("postgresql://u:postgres://@h/d", variable="X").password == "postgres://"

    @pytest.mark.parametrize(
        "value",
        [
            "s3cr3t",
            "mysql://u:s3cr3t@h/d",
            "sqlite:///s3cr3t",
            "postgresql+asyncpg://u:s3cr3t@h/d",
            "postgresql://u:s3cr3t@h:port/d",
            "postgresql://u:s3cr3t@h",
            "postgresql://u:s3cr3t@h/",
            "http://u:s3cr3t@h/d",
            "://u:s3cr3t@h/d",
            "host=h dbname=d password=s3cr3t",
            "postgresql://u:s3cr3t@[::1/d",
            "postgresql://u:p@s3cr3t@h/d",
            "",
        ],
    )
    def test_of_another_kind_is_refused_without_showing_it(self, value):
        with pytest.raises(InvalidDatabaseUrl) as error:
            parse_database_url(value, variable="THE_VARIABLE")
        assert str(error.value) == FORM
        assert "s3cr3t" not in "".join(traceback.format_exception(error.value))


class TestASession:
    @pytest.fixture
    def engine(self, messenger):
        return open_engine(messenger.url)

    def test_is_read_write_at_read_committed_and_named_whatever_the_defaults(self, messenger, engine):
        name = messenger.value("SELECT current_database()")
        for setting in (
            "default_transaction_isolation = 'serializable'",
            "default_transaction_read_only = on",
            "application_name = 'another'",
            "client_encoding = 'LATIN1'",
        ):
            messenger.run(f"ALTER DATABASE {name} SET {setting}")
        with engine.connect() as connection:
            shown = connection.execute(
                text(
                    "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only'), "
                    "current_setting('application_name'), current_setting('client_encoding')"
                )
            ).one()
        assert tuple(shown) == ("read committed", "off", "test_database", "UTF8")

    @pytest.mark.parametrize(
        ("listed", "in_force"),
        [
            ("hostile, public, pg_catalog", "pg_catalog, hostile, public, pg_catalog"),
            ('hostile, "$user", pg_temp', 'hostile, "$user", pg_temp'),
            ("''", '""'),
        ],
    )
    def test_means_the_built_ins_whatever_comes_first_in_the_search_path(self, messenger, engine, listed, in_force):
        messenger.run("CREATE SCHEMA hostile")
        messenger.run("CREATE FUNCTION hostile.now() RETURNS text LANGUAGE sql AS $$ SELECT 'an impostor' $$")
        messenger.run(f"ALTER DATABASE {messenger.value('SELECT current_database()')} SET search_path = {listed}")
        with engine.connect() as connection:
            for _ in range(2):
                with connection.begin():
                    now, path = connection.execute(text("SELECT now(), current_setting('search_path')")).one()
                assert isinstance(now, datetime)
                assert path == in_force

    def test_ends_with_its_connection(self, messenger, engine):
        with engine.connect() as connection:
            pid = connection.scalar(text("SELECT pg_backend_pid()"))
        wait_for(
            lambda: not messenger.rows("SELECT FROM pg_stat_activity WHERE pid = :pid", pid=pid), 5, "the session's end"
        )

    def test_that_is_interrupted_ends_its_statement_on_the_server(self, messenger, engine):
        class Interrupted(BaseException):
            pass

        def interrupt(*_):
            raise Interrupted

        asleep = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"

        def interrupt_when_asleep():
            wait_for(lambda: messenger.rows(asleep), 5, "the statement")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, interrupt)
        watcher = threading.Thread(target=interrupt_when_asleep)
        watcher.start()
        try:
            with pytest.raises(Interrupted), engine.connect() as connection:
                connection.execute(text("SELECT pg_sleep(20)"))
        finally:
            watcher.join(10)
            signal.signal(signal.SIGUSR1, before)
        wait_for(lambda: not messenger.rows(asleep), 2, "the statement to end on the server")

    def test_prepares_no_statements(self, engine):
        with engine.connect() as connection:
            for _ in range(10):
                connection.execute(text("SELECT CAST(:n AS integer)"), {"n": 1})
            assert connection.scalar(text("SELECT count(*) FROM pg_prepared_statements")) == 0

    @pytest.mark.parametrize(
        ("stored", "read"),
        [
            ("-infinity", datetime.min.replace(tzinfo=UTC)),
            ("4713-01-01 00:00:00+00 BC", datetime.min.replace(tzinfo=UTC)),
            ("0001-12-31 23:59:59.999999+00 BC", datetime.min.replace(tzinfo=UTC)),
            ("0001-01-01 00:00:00+00", datetime.min.replace(tzinfo=UTC)),
            ("0001-01-01 00:00:00+14", datetime.min.replace(tzinfo=UTC)),
            ("9999-12-31 23:59:59.999999+00", datetime.max.replace(tzinfo=UTC)),
            ("10000-01-01 00:00:00+00", datetime.max.replace(tzinfo=UTC)),
            ("294276-12-31 00:00:00+00", datetime.max.replace(tzinfo=UTC)),
            ("infinity", datetime.max.replace(tzinfo=UTC)),
            ("2026-03-29 01:30:00.123456+00", datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)),
        ],
    )
    def test_reads_any_moment_as_the_nearest_that_python_has(self, engine, stored, read):
        with engine.connect() as connection:
            connection.execute(text("SET LOCAL TimeZone = 'UTC'"))
            assert connection.scalar(text("SELECT CAST(:t AS timestamptz)"), {"t": stored}) == read

    @pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/Los_Angeles"])
    @pytest.mark.parametrize("stored", ["0001-01-01 00:00:00+00", "9999-12-31 23:59:59+00"])
    def test_reads_them_in_any_time_zone(self, engine, zone, stored):
        with engine.connect() as connection:
            connection.execute(text(f"SET LOCAL TimeZone = '{zone}'"))
            assert connection.scalar(text("SELECT CAST(:t AS timestamptz)"), {"t": stored}).year in {1, 9999}

    def test_works_on_a_database_without_an_encoding(self, server):
        name = server.create("template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'")
        with open_engine(server.url(name)).connect() as connection:
            assert connection.scalar(text("SELECT 'звонок'")) == "звонок"
        server.drop(name)


class TestADatabaseThatCannotBeReached:
    def test_because_it_refuses_connections_is_unavailable_at_once(self):
        started = time.monotonic()
        error = failure("postgresql://u:s3cr3t@127.0.0.1:1/d")
        assert time.monotonic() - started < 5
        assert isinstance(error, DatabaseUnavailable)
        assert str(error).startswith("the messenger database cannot be reached: ")
        assert "s3cr3t" not in "".join(traceback.format_exception(error))

    def test_because_it_never_answers_is_unavailable_within_seconds(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            started = time.monotonic()
            error = failure(f"postgresql://u:s3cr3t@127.0.0.1:{silent.getsockname()[1]}/d")
        assert isinstance(error, DatabaseUnavailable)
        assert time.monotonic() - started < 8
        assert "s3cr3t" not in str(error)

    def test_because_it_speaks_another_protocol_is_unavailable(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer():
                with suppress(OSError):
                    while True:
                        client, _ = listener.accept()
                        client.recv(1024)
                        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        client.close()

            threading.Thread(target=answer, daemon=True).start()
            error = failure(f"postgresql://u:s3cr3t@127.0.0.1:{listener.getsockname()[1]}/d")
            # Wakes the thread, which close alone does not.
            listener.shutdown(socket.SHUT_RDWR)
        assert isinstance(error, DatabaseUnavailable)
        assert "s3cr3t" not in str(error)

    def test_because_its_name_is_unknown_is_unavailable(self):
        error = failure("postgresql://u:s3cr3t@no-such-host.invalid/d")
        assert isinstance(error, DatabaseUnavailable)
        assert "s3cr3t" not in str(error)

    def test_because_there_is_no_such_socket_is_unavailable(self):
        assert isinstance(failure("postgresql://u:s3cr3t@/d?host=/no/such/folder"), DatabaseUnavailable)

    def test_because_there_is_no_such_database_says_so(self, server):
        error = failure(server.url("no_such_database"))
        assert 'database "no_such_database" does not exist' in str(error)

    @pytest.mark.parametrize("query", ["no_such_parameter=1", "sslmode=no_such_mode"])
    def test_because_the_url_asks_for_nonsense_says_so(self, query):
        error = failure(f"postgresql://u:s3cr3t@127.0.0.1:1/d?{query}")
        assert "no_such_" in str(error)
        assert "None" not in str(error)
        assert "s3cr3t" not in str(error)

    def test_because_it_hung_up_is_unavailable(self, messenger):
        engine = open_engine(messenger.url)
        with engine.connect() as connection:
            pid = connection.scalar(text("SELECT pg_backend_pid()"))
            messenger.run("SELECT pg_terminate_backend(:pid, 5000)", pid=pid)
            with pytest.raises(DatabaseUnavailable) as error, clear_errors("messenger"):
                connection.execute(text("SELECT 1"))
        assert str(error.value).startswith("the messenger database ")
        assert "\n" not in str(error.value)


class TestAServerThatFallsSilent:
    """As a frozen one does, whose machine still answers for it."""

    LIMIT = timedelta(seconds=0.4)

    def work(self, url: str) -> None:
        database = parse_database_url(url, variable="THE_VARIABLE")
        engine = connect_to(database, application_name="test_database", answer_timeout=self.LIMIT)
        with clear_errors("messenger"), engine.begin() as connection:
            connection.execute(text("CREATE TEMPORARY TABLE t AS SELECT :n AS n"), {"n": 1})

    def test_is_given_up_at_whichever_request_it_does(self, messenger):
        with Breakpoint(messenger.url) as network:
            self.work(network.url)
        # The first is connecting, which has a limit of its own; the last one, the good-bye, needs no answer.
        points = [(n, side) for n in range(1, len(network.requests) - 1) for side in Side]
        assert any(network.requests[n] == "COMMIT" for n, _ in points)

        def fall_silent(point):
            with Breakpoint(messenger.url, *point) as network:
                started = time.monotonic()
                with pytest.raises(DatabaseUnavailable) as error:
                    self.work(network.url)
                assert time.monotonic() - started < 5
            return str(error.value)

        with ThreadPoolExecutor(8) as pool:
            errors = set(pool.map(fall_silent, points))
        assert errors == {"the messenger database cannot be reached: no answer for 0.4 s"}

    def test_may_take_its_time_as_long_as_it_answers(self, messenger):
        database = parse_database_url(messenger.url, variable="THE_VARIABLE")
        engine = connect_to(database, application_name="test_database", answer_timeout=timedelta(seconds=20))
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT pg_sleep(0.5) IS NOT NULL"))
            assert connection.scalar(text("SELECT count(*) FROM generate_series(1, 100000)")) == 100_000


class TestAnErrorOfTheDatabase:
    def test_is_one_line_with_its_sqlstate(self, messenger):
        error = failure(messenger.url, "SELECT * FROM no_such_table")
        assert isinstance(error, DatabaseRefused)
        assert str(error) == 'the messenger database refused (42P01): relation "no_such_table" does not exist'

    @pytest.mark.parametrize(
        ("statement", "sqlstate"),
        [
            (
                "INSERT INTO messenger.call_sessions SELECT * FROM messenger.call_sessions",
                "23505",
            ),
            ("UPDATE messenger.call_sessions SET started_at = NULL", "23502"),
            ("UPDATE messenger.call_sessions SET status = 'Nonsense'", "23514"),
        ],
        ids=["unique", "not-null", "check"],
    )
    def test_quotes_no_row_of_the_host(self, messenger, statement, sqlstate):
        (call,) = messenger.add(a_ringing_call())
        messenger.run("ALTER TABLE messenger.call_sessions ADD CONSTRAINT no_nonsense CHECK (status <> 'Nonsense')")
        error = failure(messenger.url, statement)
        assert isinstance(error, DatabaseRefused)
        assert f"({sqlstate})" in str(error)
        shown = "".join(traceback.format_exception(error))
        assert "DETAIL" not in shown
        assert str(call.id) not in shown
        assert str(call.caller_user_id) not in shown

    def test_shows_no_parameters(self, messenger):
        with (
            pytest.raises(DatabaseRefused) as error,
            clear_errors("messenger"),
            open_engine(messenger.url).connect() as connection,
        ):
            connection.execute(text("SELECT :secret FROM no_such_table"), {"secret": "s3cr3t"})
        assert "s3cr3t" not in "".join(traceback.format_exception(error.value))

    def test_that_is_ours_passes_unchanged(self):
        with pytest.raises(ZeroDivisionError), clear_errors("messenger"):
            raise ZeroDivisionError
