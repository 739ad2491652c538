"""`pin-jobs check` on real chathouse databases, each broken in one way."""

import logging
from datetime import UTC, datetime, timedelta

import pytest

from pin_jobs.chathouse.check import EXPLAINED, check_chathouse
from pin_jobs.chathouse.checks import OperatorChecks
from pin_jobs.chathouse.contract import COLUMNS, INDEXES, TABLE_PRIVILEGES
from pin_jobs.chathouse.dialog_api import MailLimit, MailLimitAnswer, StageBounds
from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.chathouse.redis_store import RedisStore
from pin_jobs.chathouse.transaction import QUERIES
from pin_jobs.contract import Severity
from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.migrations import known_revisions
from pin_jobs_tests.conftest import CHATHOUSE_GRANTS, CHATHOUSE_ROLE

REVISIONS = known_revisions("chathouse")
# As the statistics of a large chathouse would have it.
LARGE = (
    "UPDATE pg_class SET reltuples = 5000000 "
    "WHERE relnamespace = CAST('chathouse' AS regnamespace) AND relkind IN ('r', 'p')"
)
# Of the wanted indexes, the one that a primary key stands for.
DROPS = {"ix_dialogs_lady": "ALTER TABLE chathouse.dialogs DROP CONSTRAINT dialogs_pkey"}


def lines(chathouse, *, engine=None, revisions=REVISIONS, **arguments):
    findings = check_chathouse(engine or chathouse.jobs_engine, PostChatMailOptions(), revisions, **arguments)
    return [f"{finding.severity}: {finding.line}" for finding in findings]


def engine_of(server, chathouse, role):
    url = server.url(chathouse.value("SELECT current_database()"), role=role)
    return connect_to(parse_database_url(url, variable="URL of the test"), application_name="test")


@pytest.fixture
def own_role(server, chathouse):
    """A role with what grants_chathouse.sql gives, for tests that change what it may."""
    role = server.create_role()
    grants = CHATHOUSE_GRANTS.replace(CHATHOUSE_ROLE, role).replace("%", "%%")
    server.run(grants, database=chathouse.value("SELECT current_database()"))
    return role


class EverythingAllowed:
    """A dialog API of the test's own."""

    def mail_limit(self, lady_api_id, man_ulid):
        return MailLimitAnswer(MailLimit.ALLOWED, f"{lady_api_id} may write to {man_ulid}")


@pytest.fixture
def create_task(chathouse):
    """Runs a whole check, of which nothing fails."""

    def run():
        log = logging.getLogger("pin_jobs_tests")
        checks = OperatorChecks(
            chathouse.jobs_engine,
            PostChatMailOptions(),
            api=EverythingAllowed(),
            bounds=StageBounds(concurrency=1, deadline=timedelta(seconds=45)),
            store=RedisStore(None, log),
            log=log,
        )
        checked = checks.create_tasks(checks.check_mail_limits(checks.find_candidates(None)))
        checks.close()
        assert checked.failures == {}

    return run


def test_a_database_that_follows_the_contract_has_no_findings_however_large(chathouse):
    assert lines(chathouse) == []
    chathouse.run(LARGE)
    assert lines(chathouse) == []


def test_a_check_changes_nothing_and_leaves_nothing_behind(chathouse):
    everything = "SELECT relname, relfilenode, reltuples FROM pg_class ORDER BY oid"
    before = chathouse.rows(everything)
    lines(chathouse)
    assert chathouse.rows(everything) == before
    assert chathouse.value("SELECT count(*) FROM pin_jobs.operator_checks") == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DROP TABLE chathouse.inmails", "error: chathouse.inmails is missing"),
        ("DROP SCHEMA chathouse CASCADE", "error: chathouse.operator_runners is missing"),
        (
            "ALTER TABLE chathouse.dialogs DROP COLUMN has_mail_limits",
            "error: chathouse.dialogs has no column has_mail_limits (bool)",
        ),
        (
            "ALTER TABLE chathouse.chat_activity ALTER happened_at TYPE timestamp",
            "error: chathouse.chat_activity.happened_at is timestamp without time zone; it must be timestamptz",
        ),
        (
            "ALTER TABLE chathouse.dialogs ALTER is_active TYPE integer USING CAST(is_active AS integer)",
            "error: chathouse.dialogs.is_active is integer; it must be bool",
        ),
        (
            "ALTER TABLE chathouse.ladies ALTER db_id TYPE text",
            "error: chathouse.ladies.db_id is text; it must be bigint",
        ),
        (
            "ALTER TABLE chathouse.operator_tasks ADD COLUMN tenant text NOT NULL",
            "error: chathouse.operator_tasks.tenant is NOT NULL without a default, and a check knows nothing to put",
        ),
        (
            (
                "ALTER TABLE chathouse.operator_tasks DROP COLUMN event_trigger;"
                "ALTER TABLE chathouse.operator_tasks ADD event_trigger text GENERATED ALWAYS AS ('x') STORED;"
                f"GRANT SELECT (event_trigger), INSERT (event_trigger) ON chathouse.operator_tasks TO {CHATHOUSE_ROLE}"
            ),
            "error: chathouse.operator_tasks.event_trigger is generated by the database, and a check writes it",
        ),
        (
            "ALTER TABLE chathouse.operator_tasks ALTER event_trigger TYPE varchar(23)",
            "error: chathouse.operator_tasks.event_trigger takes 23 characters, and a check writes 24",
        ),
        (
            (
                "CREATE DOMAIN chathouse.short AS varchar(10);"
                "ALTER TABLE chathouse.operator_tasks ALTER module TYPE chathouse.short"
            ),
            "error: chathouse.operator_tasks.module takes 10 characters, and a check writes 12",
        ),
        (
            f"REVOKE SELECT (sent_at) ON chathouse.inmails FROM {CHATHOUSE_ROLE}",
            "error: our role may not SELECT column sent_at of chathouse.inmails: run deploy/sql/grants_chathouse.sql",
        ),
        (
            f"REVOKE INSERT (event_at) ON chathouse.operator_tasks FROM {CHATHOUSE_ROLE}",
            "error: our role may not INSERT column event_at of chathouse.operator_tasks",
        ),
        (f"REVOKE USAGE ON SCHEMA chathouse FROM {CHATHOUSE_ROLE}", "error: USAGE on schema chathouse is missing"),
        (f"REVOKE USAGE ON SCHEMA pin_jobs FROM {CHATHOUSE_ROLE}", "error: USAGE on schema pin_jobs is missing"),
        (
            f"REVOKE DELETE ON pin_jobs.closed_tasks FROM {CHATHOUSE_ROLE}",
            "error: our role may not DELETE pin_jobs.closed_tasks: run deploy/sql/grants_chathouse.sql",
        ),
        (
            f"REVOKE SELECT ON pin_jobs.alembic_version_chathouse FROM {CHATHOUSE_ROLE}",
            "error: our role may not SELECT pin_jobs.alembic_version_chathouse",
        ),
        (
            "ALTER TABLE chathouse.ladies ENABLE ROW LEVEL SECURITY",
            "error: row-level security hides rows of chathouse.ladies from our role, so a check refuses to run",
        ),
        (
            "UPDATE pin_jobs.alembic_version_chathouse SET version_num = '9999'",
            "error: the schema pin_jobs is at revision 9999, which only a newer pin_jobs knows",
        ),
        (
            "DROP TABLE pin_jobs.operator_checks",
            f"error: pin_jobs.operator_checks is missing although the schema is at revision {REVISIONS[-1]}",
        ),
        ("DROP SCHEMA pin_jobs CASCADE", "error: the schema pin_jobs has no tables of the post-chat mail"),
        (
            "ALTER TABLE chathouse.operator_tasks DROP CONSTRAINT operator_tasks_pkey",
            "error: the insert of tasks does not work: there is no unique or exclusion constraint",
        ),
        (
            (
                "ALTER TABLE chathouse.operator_tasks RENAME TO tasks;"
                "CREATE VIEW chathouse.operator_tasks AS SELECT DISTINCT * FROM chathouse.tasks;"
                f"GRANT SELECT, INSERT ON chathouse.operator_tasks TO {CHATHOUSE_ROLE}"
            ),
            "error: the insert of tasks does not work: ",
        ),
        (
            "ALTER TABLE chathouse.operator_runners DROP CONSTRAINT operator_runners_pkey",
            "warning: chathouse.operator_runners.operator_id is neither a primary key nor unique: two rows of one",
        ),
        (
            f"GRANT UPDATE ON chathouse.operator_tasks TO {CHATHOUSE_ROLE}",
            "warning: our role may UPDATE chathouse.operator_tasks, and never does",
        ),
        (
            f"GRANT INSERT, DELETE ON chathouse.inmails TO {CHATHOUSE_ROLE}",
            "warning: our role may DELETE, INSERT chathouse.inmails, and never does",
        ),
    ],
)
def test_each_difference_is_one_line(chathouse, change, words):
    for statement in change.split(";"):
        chathouse.run(statement)

    found = lines(chathouse)

    assert any(line.startswith(words) for line in found), found
    assert not [line for line in found if "\n" in line]
    if words.startswith("warning"):
        assert len(found) == 1


def test_a_schema_that_is_behind_is_an_error(chathouse):
    (line,) = lines(chathouse, revisions=[*REVISIONS, "9998"])
    assert line == (
        f"error: the schema pin_jobs is at revision {REVISIONS[-1]}, this version's is 9998: until `pin-jobs migrate` "
        "has run, operators may not be checked"
    )


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE chathouse.ladies ADD COLUMN note text NOT NULL DEFAULT 'x'",
        "ALTER TABLE chathouse.inmails ADD COLUMN note text NOT NULL",
        "ALTER TABLE chathouse.operator_tasks ADD COLUMN number bigint GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE chathouse.operator_runners ALTER operator_id TYPE varchar(40)",
        "ALTER TABLE chathouse.dialogs ALTER man_ulid TYPE text",
        "ALTER TABLE chathouse.chat_activity ALTER sum TYPE double precision",
        (
            "ALTER TABLE chathouse.chat_activity RENAME TO statistics;"
            "CREATE VIEW chathouse.chat_activity AS SELECT * FROM chathouse.statistics;"
            f"GRANT SELECT ON chathouse.chat_activity TO {CHATHOUSE_ROLE}"
        ),
        (
            "ALTER TABLE chathouse.operator_tasks RENAME TO tasks;"
            "CREATE VIEW chathouse.operator_tasks AS SELECT * FROM chathouse.tasks;"
            f"GRANT SELECT, INSERT ON chathouse.operator_tasks TO {CHATHOUSE_ROLE}"
        ),
        "ALTER TABLE chathouse.operator_tasks ALTER event_trigger TYPE varchar(24), ALTER kind TYPE varchar(19)",
        # Small tables are read as fast without an index.
        "DROP INDEX chathouse.ix_chat_activity_pair; DROP INDEX chathouse.ix_inmails_pair",
    ],
)
def test_what_works_all_the_same_is_no_finding_and_does_work(chathouse, create_task, change):
    for statement in change.split(";"):
        chathouse.run(statement)
    assert lines(chathouse) == []
    dialog = chathouse.add_chat(chathouse.add_operator("anna"))
    create_task()
    (task,) = chathouse.tasks()
    assert (task["operator_id"], task["lady_db_id"], task["man_ulid"]) == ("anna", dialog.lady.db_id, dialog.man_ulid)
    create_task()
    assert len(chathouse.tasks()) == 1


class TestAnIndexThatIsMissing:
    @pytest.mark.parametrize("wanted", INDEXES, ids=lambda wanted: wanted.name)
    def test_of_a_large_table_is_a_warning_until_the_statement_in_it_has_run(self, chathouse, wanted):
        chathouse.run(LARGE)
        chathouse.run(DROPS.get(wanted.name, f"DROP INDEX chathouse.{wanted.name}"))

        (line,) = lines(chathouse)

        assert line.startswith(f"warning: no index on {wanted.table} begins with {wanted.beginnings[0][0]}")
        assert "reads all of its 5000000 rows: CREATE INDEX CONCURRENTLY " in line
        create = line.partition(": CREATE ")[2]
        chathouse.run(f"CREATE {create.replace('CONCURRENTLY ', '')}")
        chathouse.run(LARGE)
        assert lines(chathouse) == []

    @pytest.mark.parametrize(
        "instead",
        [
            "(lady_db_id)",
            "(sent_at, lady_db_id, man_ulid)",
            "(lady_db_id, lower(man_ulid))",
            "(lady_db_id, man_ulid) WHERE sent_at > '2026-01-01'",
            "USING brin (lady_db_id, man_ulid)",
        ],
    )
    def test_is_missing_where_another_does_not_serve(self, chathouse, instead):
        chathouse.run(LARGE)
        chathouse.run("DROP INDEX chathouse.ix_inmails_pair")
        chathouse.run(f"CREATE INDEX another ON chathouse.inmails {instead}")
        chathouse.run(LARGE)
        (line,) = lines(chathouse)
        assert "CREATE INDEX another ON chathouse.inmails USING" in line

    @pytest.mark.parametrize("instead", ["(lady_db_id, man_ulid)", "(lady_db_id, sent_at) INCLUDE (man_ulid)"])
    def test_is_not_missing_where_another_serves(self, chathouse, instead):
        chathouse.run("DROP INDEX chathouse.ix_inmails_pair")
        chathouse.run(f"CREATE INDEX another ON chathouse.inmails {instead}")
        chathouse.run(LARGE)
        assert lines(chathouse) == []

    def test_that_is_invalid_counts_as_missing(self, chathouse):
        chathouse.run(
            "UPDATE pg_index SET indisvalid = false "
            "WHERE indexrelid = CAST('chathouse.ix_operator_tasks_pair' AS regclass)"
        )
        chathouse.run(LARGE)
        (line,) = lines(chathouse)
        assert "(lady_db_id, man_ulid, status) (invalid)" in line

    @pytest.mark.parametrize("wanted", INDEXES, ids=lambda wanted: wanted.name)
    def test_of_a_table_that_is_just_too_small_to_matter_is_no_finding(self, chathouse, wanted):
        chathouse.run(DROPS.get(wanted.name, f"DROP INDEX chathouse.{wanted.name}"))
        resize = "UPDATE pg_class SET reltuples = :rows WHERE oid = CAST(:table AS regclass)"
        chathouse.run(resize, rows=wanted.least_rows - 1, table=wanted.table)
        assert lines(chathouse) == []
        chathouse.run(resize, rows=wanted.least_rows, table=wanted.table)
        assert wanted.name in str(lines(chathouse))

    def test_is_looked_for_on_a_partitioned_table_by_the_rows_of_its_partitions(self, chathouse):
        for statement in (
            "DROP TABLE chathouse.chat_activity",
            """
            CREATE TABLE chathouse.chat_activity (lady_ulid char(26), man_ulid char(26), action text,
                                                  sum numeric(12, 2), is_free bool, happened_at timestamptz)
                   PARTITION BY RANGE (happened_at)
            """,
            "CREATE TABLE chathouse.all_years PARTITION OF chathouse.chat_activity DEFAULT",
            f"GRANT SELECT ON chathouse.chat_activity TO {CHATHOUSE_ROLE}",
        ):
            chathouse.run(statement)
        assert lines(chathouse) == []
        chathouse.run("UPDATE pg_class SET reltuples = 700000 WHERE oid = CAST('chathouse.all_years' AS regclass)")
        (line,) = lines(chathouse)
        assert line.startswith("warning: no index on chathouse.chat_activity begins with lady_ulid and man_ulid")
        assert "all of its 700000 rows" in line


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("statement_timeout = '5s'", "warning: statement_timeout of the role {role} is 5 s; a check sets its own"),
        ("statement_timeout = '50ms'", "error: statement_timeout of the role {role} is 0.05 s: too short"),
        ("idle_in_transaction_session_timeout = '1s'", "warning: idle_in_transaction_session_timeout of the role"),
        ("transaction_timeout = '30s'", "warning: transaction_timeout of the role {role} is 30 s: reading the history"),
    ],
)
def test_limits_of_the_role_are_compared_with_ours(server, chathouse, own_role, setting, words):
    name = setting.partition(" ")[0]
    if not chathouse.rows("SELECT FROM pg_settings WHERE name = :name", name=name):
        pytest.skip(f"this server has no {name}")
    chathouse.run(f"ALTER ROLE {own_role} SET {setting}")
    found = lines(chathouse, engine=engine_of(server, chathouse, own_role))
    assert any(line.startswith(words.format(role=own_role)) for line in found), found


def test_a_lock_timeout_of_the_role_is_no_finding_because_a_check_sets_its_own(server, chathouse, own_role):
    chathouse.run(f"ALTER ROLE {own_role} SET lock_timeout = '10ms'")
    assert lines(chathouse, engine=engine_of(server, chathouse, own_role)) == []


def test_a_role_with_few_connections_is_told(server, chathouse, own_role):
    chathouse.run(f"ALTER ROLE {own_role} CONNECTION LIMIT 2")
    (line,) = lines(chathouse, engine=engine_of(server, chathouse, own_role))
    assert line.startswith(f"warning: the role {own_role} may have 2 connections at once; a run,")


def test_a_superuser_is_told_that_less_would_do(chathouse):
    found = lines(chathouse, engine=chathouse.engine)
    assert any("is a superuser; deploy/sql/grants_chathouse.sql makes one" in line for line in found)
    assert not [line for line in found if line.startswith("error")]


@pytest.mark.parametrize(("seconds", "direction"), [(5, "ahead of"), (-5, "behind")])
def test_a_worker_whose_clock_is_off_is_told(chathouse, seconds, direction):
    (line,) = lines(chathouse, worker_clock=lambda: datetime.now(UTC) + timedelta(seconds=seconds))
    assert line.startswith("warning: the clock of this machine is ")
    assert f"s {direction} the server's; the server's decides, so no operator is checked early or late" in line


def test_the_contract_asks_for_exactly_what_the_grants_give(chathouse):
    granted = {
        (f"{row['schema']}.{row['name']}", row["column"], row["privilege"])
        for row in chathouse.rows(
            """
            SELECT table_schema AS schema, table_name AS name, column_name AS column, privilege_type AS privilege
              FROM information_schema.column_privileges WHERE grantee = :role AND table_schema = 'chathouse'
             UNION
            SELECT table_schema, table_name, NULL, privilege_type
              FROM information_schema.table_privileges WHERE grantee = :role
            """,
            role=CHATHOUSE_ROLE,
        )
    }
    of_columns = {
        (table, column, need) for table, columns in COLUMNS.items() for column, c in columns.items() for need in c.needs
    }
    of_tables = {(table, None, need) for table, needs in TABLE_PRIVILEGES.items() for need in needs}
    assert granted == of_columns | of_tables


def test_every_statement_that_touches_a_table_is_explained():
    touching = {name for name, query in QUERIES.items() if "chathouse." in query.text or "pin_jobs." in query.text}
    assert EXPLAINED.keys() == touching


def test_errors_come_first(chathouse):
    chathouse.run(f"GRANT DELETE ON chathouse.ladies TO {CHATHOUSE_ROLE}")
    chathouse.run(f"REVOKE INSERT ON pin_jobs.closed_tasks FROM {CHATHOUSE_ROLE}")
    findings = check_chathouse(chathouse.jobs_engine, PostChatMailOptions(), REVISIONS)
    assert [finding.severity for finding in findings] == [Severity.ERROR, Severity.WARNING]
