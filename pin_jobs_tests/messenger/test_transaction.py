import logging
import threading
import time
import uuid
from datetime import timedelta
from types import SimpleNamespace

import psycopg
import pytest
from sqlalchemy import create_engine, text

from pin_jobs.database import DatabaseRefused, DatabaseUnavailable, connect_to, parse_database_url
from pin_jobs.messenger.batch import LIVE_CYCLE_LOCK, LOCK_NAMESPACE
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.messenger.transaction import QUERIES, CycleTooLong, CycleTransaction, OutcomeUnknown
from pin_jobs_tests.conftest import Interrupted
from pin_jobs_tests.factories import a_ringing_call
from pin_jobs_tests.proxy import Breakpoint, Cut, Proxy, Side
from pin_jobs_tests.waiting import wait_for, when

LOCK_CALLS = "LOCK TABLE messenger.call_sessions IN ACCESS EXCLUSIVE MODE"


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def at_commit(messenger, function):
    """Something runs inside COMMIT itself: a batch checks deferred constraints before that, so this one is put off."""
    messenger.run(
        "CREATE FUNCTION pin_jobs.put_off() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN SET CONSTRAINTS ALL DEFERRED; RETURN NEW; END $$"
    )
    messenger.run(
        "CREATE TRIGGER put_off BEFORE INSERT ON pin_jobs.reaper_cycles FOR EACH ROW "
        "EXECUTE FUNCTION pin_jobs.put_off()"
    )
    messenger.run(
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON pin_jobs.reaper_cycles DEFERRABLE INITIALLY DEFERRED "
        f"FOR EACH ROW EXECUTE FUNCTION {function}"
    )


@pytest.fixture
def new_transaction(messenger):
    transactions = []

    def make(engine=None, **options):
        transaction = CycleTransaction(
            engine or messenger.jobs_engine,
            CallTimeoutReaperOptions(**options),
            run_id="a-run",
            application_name="call_timeout_reaper/a-run",
            log=logging.getLogger("pin_jobs_tests"),
        )
        transactions.append(transaction)
        return transaction

    yield make
    for transaction in transactions:
        transaction.close()


def sessions(messenger):
    return messenger.rows(
        "SELECT * FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name LIKE 'call_timeout_reaper/%'"
    )


def is_asleep(messenger):
    return [row for row in sessions(messenger) if row["wait_event"] == "PgSleep"]


class TestTheBounds:
    def test_hold_against_a_longer_one_of_the_role(self, messenger, new_transaction, monkeypatch):
        # PostgreSQL does not set a timer anew that runs already.
        if int(messenger.value("SHOW server_version_num")) < 170000:
            pytest.skip("transaction_timeout came with PostgreSQL 17")
        messenger.run(f"ALTER DATABASE {messenger.value('SELECT current_database()')} SET transaction_timeout = '1h'")
        no_other_bound = "SELECT set_config('idle_in_transaction_session_timeout', '0', true)"
        monkeypatch.setitem(QUERIES, "no_other_bound", text(no_other_bound))
        transaction = new_transaction(max_run_duration=seconds(0.8), lock_ttl=seconds(1))
        transaction.run("no_other_bound")
        assert sessions(messenger)
        wait_for(lambda: not sessions(messenger), timeout=5, what="the server to end the session at lock_ttl")

    def test_are_set_in_the_session(self, new_transaction, monkeypatch):
        monkeypatch.setitem(
            QUERIES,
            "settings",
            text("SELECT name, setting, unit, current_setting('server_version_num')::integer AS v FROM pg_settings"),
        )
        transaction = new_transaction(max_run_duration=seconds(20), lock_ttl=seconds(40))
        rows = transaction.rows("settings")
        settings = {row["name"]: row["setting"] for row in rows}
        assert 15_000 < int(settings["statement_timeout"]) <= 20_000
        assert 35_000 < int(settings["idle_in_transaction_session_timeout"]) <= 40_000
        if rows[0]["v"] >= 170000:
            assert settings["transaction_timeout"] == "40000"
        assert settings["client_connection_check_interval"] == "500"
        assert settings["row_security"] == "off"
        assert settings["transaction_isolation"] == "read committed"
        assert settings["transaction_read_only"] == "off"
        assert settings["TimeZone"] == "UTC"
        assert settings["DateStyle"] == "ISO, YMD"

    def test_shrink_with_the_time_that_is_left(self, new_transaction, monkeypatch):
        limit = "extract(epoch FROM CAST(current_setting('{}') AS interval))"
        monkeypatch.setitem(QUERIES, "run_limit", text("SELECT " + limit.format("statement_timeout")))
        idle_limit = limit.format("idle_in_transaction_session_timeout")
        monkeypatch.setitem(QUERIES, "idle_limit", text("SELECT " + idle_limit))
        now = 1000.0
        monkeypatch.setattr("pin_jobs.messenger.transaction.time", SimpleNamespace(monotonic=lambda: now))
        transaction = new_transaction(max_run_duration=seconds(20), lock_ttl=seconds(40))
        for elapsed, run, idle in ((0, 20, 40), (12.5, 7.5, 27.5), (19.5, 0.5, 20.5)):
            now = 1000.0 + elapsed
            assert float(transaction.value("run_limit")) == pytest.approx(run, abs=0.002)
            assert float(transaction.value("idle_limit")) == pytest.approx(idle, abs=0.002)
        now = 1020.0
        with pytest.raises(CycleTooLong):
            transaction.value("run_limit")

    def test_show_who_is_at_work(self, messenger, new_transaction):
        new_transaction()
        assert [row["application_name"] for row in sessions(messenger)] == ["call_timeout_reaper/a-run"]

    def test_end_with_the_transaction_for_a_pooler_hands_the_session_on(self, messenger, new_transaction):
        url = parse_database_url(messenger.jobs_url, variable="URL of the test")
        pooled = create_engine(url, pool_size=1, max_overflow=0, connect_args={"application_name": "pooled"})
        shown = text(
            "SELECT pg_backend_pid() AS pid, jsonb_object_agg(name, setting) AS settings FROM pg_settings "
            "WHERE name IN ('application_name', 'statement_timeout', 'idle_in_transaction_session_timeout', "
            "'transaction_timeout', 'client_connection_check_interval', 'row_security', 'TimeZone', 'DateStyle')"
        )
        with pooled.connect() as connection:
            before = connection.execute(shown).one()
        for end in ("commit", "close"):
            transaction = new_transaction(pooled)
            transaction.value("try_run_lock", namespace=LOCK_NAMESPACE, job=LIVE_CYCLE_LOCK)
            transaction.commit() if end == "commit" else transaction.close()
            with pooled.connect() as connection:
                assert connection.execute(shown).one() == before
            assert messenger.locks() == []
        pooled.dispose()


class TestATransactionThatTakesTooLong:
    def test_in_a_statement_is_rolled_back_within_max_run_duration(self, messenger, new_batch):
        messenger.add(a_ringing_call(age="46s"))
        batch = new_batch(max_run_duration=seconds(0.5))
        with messenger.holding(LOCK_CALLS):
            started = time.monotonic()
            with pytest.raises(CycleTooLong, match=r"max_run_duration \(0\.5s\)"):
                batch.claim()
            assert 0.4 < time.monotonic() - started < 3
            batch.close()
            assert sessions(messenger) == []
        assert messenger.statuses() == {"Ringing": 1}

    def test_between_statements_is_rolled_back(self, messenger, new_batch, monkeypatch):
        messenger.add(a_ringing_call(age="46s"))
        now = 1000.0
        monkeypatch.setattr("pin_jobs.messenger.transaction.time", SimpleNamespace(monotonic=lambda: now))
        batch = new_batch()
        claim = batch.claim()
        now += 30
        with pytest.raises(CycleTooLong):
            batch.transition(claim)
        batch.close()
        assert messenger.statuses() == {"Ringing": 1}
        assert messenger.locks() == []

    def test_is_not_committed(self, messenger, new_batch, monkeypatch):
        messenger.add(a_ringing_call(age="46s"))
        now = 1000.0
        monkeypatch.setattr("pin_jobs.messenger.transaction.time", SimpleNamespace(monotonic=lambda: now))
        batch = new_batch()
        transitioned = batch.transition(batch.claim())
        now += 30
        with pytest.raises(CycleTooLong):
            batch.write_outbox(transitioned)
        batch.close()
        assert messenger.statuses() == {"Ringing": 1}
        assert messenger.outbox() == []

    @pytest.mark.usefixtures("frozen_worker")
    def test_idle_past_lock_ttl_loses_its_session_and_can_commit_nothing(self, messenger, new_batch, reap):
        messenger.add(a_ringing_call(age="46s"))
        batch = new_batch(lock_ttl=seconds(0.4), max_run_duration=seconds(0.3))
        transitioned = batch.transition(batch.claim())
        wait_for(lambda: not sessions(messenger), timeout=5, what="the server to end the idle session")
        assert messenger.locks() == []
        assert reap().missed == 1
        with pytest.raises(DatabaseUnavailable):
            batch.write_outbox(transitioned)
        batch.close()
        assert len(messenger.outbox()) == 1
        assert len(messenger.cycles()) == 1

    @pytest.mark.usefixtures("frozen_worker")
    def test_busy_past_lock_ttl_loses_its_session_too(self, messenger, new_transaction, monkeypatch):
        if messenger.value("SELECT CAST(current_setting('server_version_num') AS integer)") < 170000:
            pytest.skip("transaction_timeout came with PostgreSQL 17")
        # Statements shorter than any limit of their own: only the transaction's limit ends this.
        monkeypatch.setitem(QUERIES, "short", text("SELECT pg_sleep(0.05)"))
        transaction = new_transaction(lock_ttl=seconds(0.4), max_run_duration=seconds(0.3))
        started = time.monotonic()

        def work_on():
            while time.monotonic() < started + 5:
                transaction.run("short")

        with pytest.raises(DatabaseUnavailable):
            work_on()
        assert time.monotonic() - started < 3
        assert sessions(messenger) == []


class TestASessionThatIsLost:
    def test_fails_the_next_statement_and_closes_quietly(self, messenger, new_batch, caplog):
        messenger.add(a_ringing_call(age="46s"))
        batch = new_batch()
        claim = batch.claim()
        messenger.run(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name LIKE 'call_timeout_reaper/%' AND datname = current_database()"
        )
        with pytest.raises(DatabaseUnavailable) as error:
            batch.transition(claim)
        assert "\n" not in str(error.value)
        batch.close()
        assert messenger.statuses() == {"Ringing": 1}
        assert "nothing of it was committed" in caplog.text

    def test_without_a_statement_in_between_is_closed_with_a_word_about_it(self, messenger, new_batch, caplog):
        batch = new_batch()
        batch.claim()
        messenger.run(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name LIKE 'call_timeout_reaper/%' AND datname = current_database()"
        )
        batch.close()
        assert "the server rolls it back" in caplog.text

    def test_by_a_network_that_goes_away_is_cleaned_up_by_the_server(self, messenger, new_batch):
        messenger.add(a_ringing_call(age="46s"))
        with Proxy(messenger.jobs_url) as proxy:
            engine = connect_to(parse_database_url(proxy.url, variable="URL of the test"), application_name="test")
            batch = new_batch(engine=engine)
            claim = batch.claim()
        with pytest.raises(DatabaseUnavailable):
            batch.transition(claim)
        batch.close()
        wait_for(lambda: not messenger.locks(), timeout=2, what="the server to free the locks")

    def test_inside_a_statement_frees_its_locks_within_two_seconds(self, messenger, new_transaction, monkeypatch):
        # The server notices a client that is gone although it is not reading from it.
        monkeypatch.setitem(QUERIES, "long", text("SELECT pg_sleep(20)"))
        failures = []
        with Proxy(messenger.jobs_url) as proxy:
            engine = connect_to(parse_database_url(proxy.url, variable="URL of the test"), application_name="test")
            transaction = new_transaction(engine)
            transaction.value("try_run_lock", namespace=LOCK_NAMESPACE, job=LIVE_CYCLE_LOCK)

            def work():
                try:
                    transaction.run("long")
                except DatabaseUnavailable as error:
                    failures.append(error)

            worker = threading.Thread(target=work)
            worker.start()
            wait_for(lambda: [row for row in sessions(messenger) if row["state"] == "active"], 5, "the statement")
        wait_for(lambda: not messenger.locks(), timeout=2, what="the server to free the locks")
        worker.join(5)
        assert len(failures) == 1


class TestAnAnswerToCommitThatIsLost:
    @pytest.fixture(params=["with-record", "without-record"])
    def messenger(self, request, messenger):
        if request.param == "without-record":
            messenger.run("DROP SCHEMA pin_jobs CASCADE")
        return messenger

    @pytest.mark.parametrize("cut", [Cut.AFTER_COMMIT, Cut.AROUND_COMMIT])
    def test_is_found_out_when_it_was_committed(self, messenger, reap, behind_proxy, caplog, cut):
        messenger.add(a_ringing_call(age="46s"))
        caplog.set_level(logging.WARNING)
        result = reap(engine=behind_proxy(messenger.jobs_url, cut=cut))
        assert result.missed == 1
        assert messenger.statuses() == {"Missed": 1}
        assert len(messenger.outbox()) == 1
        assert "the answer to COMMIT was lost" in caplog.text
        assert "but the cycle is committed" in caplog.text

    def test_is_found_out_when_the_network_only_falls_silent(self, messenger, reap, caplog):
        messenger.add(a_ringing_call(age="46s"))
        with Breakpoint(messenger.jobs_url, "COMMIT", Side.AFTER) as network:
            url = parse_database_url(network.url, variable="URL of the test")
            assert reap(engine=connect_to(url, application_name="test", answer_timeout=seconds(0.5))).missed == 1
            assert network.reached.is_set()
        assert "no answer for 0.5 s" in caplog.text
        assert "but the cycle is committed" in caplog.text

    def test_is_found_out_when_it_was_not(self, messenger, new_batch, behind_proxy):
        messenger.add(a_ringing_call(age="46s"))
        batch = new_batch(engine=behind_proxy(messenger.jobs_url, cut=Cut.BEFORE_COMMIT))
        transitioned = batch.transition(batch.claim())
        with pytest.raises(DatabaseUnavailable) as error:
            batch.write_outbox(transitioned)
        assert "\n" not in str(error.value)
        batch.close()
        assert messenger.statuses() == {"Ringing": 1}
        assert messenger.outbox() == []
        wait_for(lambda: not messenger.locks(), timeout=2, what="the server to free the locks")


class TestAnOutcomeThatNobodyKnows:
    @pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT])
    def test_is_said_to_be_unknown_while_the_database_cannot_be_asked(
        self, messenger, new_batch, behind_proxy, monkeypatch, cut
    ):
        monkeypatch.setattr("pin_jobs.messenger.transaction._OUTCOME_PATIENCE", seconds(0.5))
        messenger.add(a_ringing_call(age="46s"))
        run_id = str(uuid.uuid4())
        engine = behind_proxy(messenger.jobs_url, cut=cut, down_after_cut=True)
        batch = new_batch(engine=engine, run_id=run_id)
        transitioned = batch.transition(batch.claim())
        with pytest.raises(OutcomeUnknown) as error:
            batch.write_outbox(transitioned)
        assert "outcome unknown" in str(error.value)
        assert run_id in str(error.value)
        assert "\n" not in str(error.value)
        batch.close()
        # What the message says to look for tells the truth.
        assert [cycle["run_id"] for cycle in messenger.cycles()] == ([run_id] if cut is Cut.AFTER_COMMIT else [])

    def test_says_nothing_of_a_rollback_when_the_outcome_is_unknown(
        self, messenger, new_batch, behind_proxy, monkeypatch, caplog
    ):
        monkeypatch.setattr("pin_jobs.messenger.transaction._OUTCOME_PATIENCE", seconds(0.3))
        messenger.add(a_ringing_call(age="46s"))
        batch = new_batch(engine=behind_proxy(messenger.jobs_url, cut=Cut.AFTER_COMMIT, down_after_cut=True))
        transitioned = batch.transition(batch.claim())
        with pytest.raises(OutcomeUnknown):
            batch.write_outbox(transitioned)
        batch.close()
        assert "nothing of it was committed" not in caplog.text


class TestAnInterruption:
    def test_inside_a_statement_ends_it_on_the_server(self, messenger, new_batch, interrupt_worker):
        messenger.add(a_ringing_call(age="46s"))
        messenger.run(
            "CREATE FUNCTION messenger.slow() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(20); RETURN NEW; END $$"
        )
        messenger.run(
            "CREATE TRIGGER slow BEFORE UPDATE ON messenger.call_sessions "
            "FOR EACH ROW EXECUTE FUNCTION messenger.slow()"
        )
        batch = new_batch()
        claim = batch.claim()
        with when(lambda: is_asleep(messenger), interrupt_worker), pytest.raises(Interrupted):
            batch.transition(claim)
        batch.close()
        wait_for(lambda: not messenger.locks(), timeout=2, what="the locks to be free")
        wait_for(lambda: not sessions(messenger), timeout=2, what="the session to end")
        assert messenger.statuses() == {"Ringing": 1}

    def test_goes_on_when_the_server_does_not_take_the_cancelling(
        self, messenger, new_batch, interrupt_worker, monkeypatch
    ):
        def refuse(_connection, *, timeout):
            raise psycopg.errors.CancellationTimeout(f"not within {timeout} s")

        monkeypatch.setattr(psycopg.Connection, "cancel_safe", refuse)
        messenger.add(a_ringing_call(age="46s"))
        batch = new_batch()
        claim = batch.claim()
        monkeypatch.setitem(QUERIES, "transition_calls", text("SELECT pg_sleep(20)"))
        with when(lambda: is_asleep(messenger), interrupt_worker), pytest.raises(Interrupted):
            batch.transition(claim)
        batch.close()
        wait_for(lambda: not messenger.locks(), timeout=2, what="the locks to be free")
        assert messenger.statuses() == {"Ringing": 1}

    def test_inside_a_commit_that_is_not_done_ends_it(self, messenger, new_batch, interrupt_worker, caplog):
        messenger.add(a_ringing_call(age="46s"))
        messenger.run(
            "CREATE FUNCTION messenger.slow() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(20); RETURN NEW; END $$"
        )
        at_commit(messenger, "messenger.slow()")
        batch = new_batch()
        transitioned = batch.transition(batch.claim())
        with when(lambda: is_asleep(messenger), interrupt_worker), pytest.raises(Interrupted):
            batch.write_outbox(transitioned)
        batch.close()
        wait_for(lambda: not messenger.locks(), timeout=2, what="the locks to be free")
        assert messenger.statuses() == {"Ringing": 1}
        assert "nothing is committed" in caplog.text

    def test_after_the_commit_tells_that_it_is_committed_and_nothing_else(
        self, messenger, new_batch, interrupt_worker, caplog
    ):
        messenger.add(a_ringing_call(age="46s"))
        with Proxy(messenger.jobs_url, cut=Cut.ANSWER_TO_COMMIT, when_cut=interrupt_worker) as proxy:
            engine = connect_to(parse_database_url(proxy.url, variable="URL of the test"), application_name="test")
            batch = new_batch(engine=engine)
            transitioned = batch.transition(batch.claim())
            with pytest.raises(Interrupted):
                batch.write_outbox(transitioned)
            batch.close()
        assert messenger.statuses() == {"Missed": 1}
        assert "the cycle is committed" in caplog.text
        assert "nothing of it was committed" not in caplog.text


class TestACommitThatIsRefused:
    def test_leaves_nothing(self, messenger, new_batch, reap):
        messenger.add(a_ringing_call(age="46s"))
        messenger.run(
            "CREATE FUNCTION messenger.refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'not in this house'; END $$"
        )
        at_commit(messenger, "messenger.refuse()")
        batch = new_batch()
        transitioned = batch.transition(batch.claim())
        with pytest.raises(DatabaseRefused, match=r"\(P0001\): not in this house$"):
            batch.write_outbox(transitioned)
        batch.close()
        assert messenger.statuses() == {"Ringing": 1}
        assert messenger.outbox() == []
        assert messenger.cycles() == []
        assert messenger.locks() == []
        messenger.run("DROP TRIGGER at_commit ON pin_jobs.reaper_cycles")
        assert reap().missed == 1
