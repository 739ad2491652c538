import logging
from datetime import timedelta

import pytest
from dagster import DagsterEventType, DagsterInstance, EnvVar, TableMetadataValue

from pin_jobs.messenger.batch import LIVE_CYCLE_LOCK, LOCK_NAMESPACE
from pin_jobs.messenger.jobs import JOB_NAME, build_call_timeout_reaper
from pin_jobs.messenger.ops import DRY_RUN_TAG, LOCK_BUSY_TAG
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.resources.op_outputs import LONGEST_TABLE
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs_tests.factories import a_ringing_call, an_answered_call
from pin_jobs_tests.proxy import Breakpoint

TAKE_RUN_LOCK = f"SELECT pg_advisory_xact_lock({LOCK_NAMESPACE}, {LIVE_CYCLE_LOCK})"


class Run:
    """A finished run of the job, seen as the UI shows it."""

    def __init__(self, result, instance):
        self.success = result.success
        self.tags = instance.get_run_by_id(result.run_id).tags
        self.run_id = result.run_id
        self.logs = [(entry.level, entry.user_message) for entry in instance.all_logs(result.run_id)]
        self.skipped = {event.step_key for event in result.all_node_events if event.is_step_skipped}
        self.failed = {event.step_key for event in result.all_node_events if event.is_step_failure}
        self.errors = [
            event.event_specific_data.error.to_string() for event in result.all_node_events if event.is_step_failure
        ]
        failures = [
            e.dagster_event.job_failure_data for e in instance.all_logs(result.run_id, DagsterEventType.RUN_FAILURE)
        ]
        self.failure = next((failure.error.message.strip() for failure in failures if failure.error), None)
        self._outputs = {
            event.step_key: event.event_specific_data.metadata
            for event in result.all_node_events
            if event.is_successful_output
        }

    def values(self, op):
        """The metadata of the op's output, without the tables."""
        return {
            name: value.value for name, value in self._outputs[op].items() if not isinstance(value, TableMetadataValue)
        }

    def table(self, op, name="calls"):
        return [dict(record.data) for record in self._outputs[op][name].records]

    def columns(self, op, name="calls"):
        return {column.name: column.type for column in self._outputs[op][name].schema.columns}


@pytest.fixture
def execute(pin_jobs_environment):
    """Runs the job in this process."""
    assert pin_jobs_environment
    database = PostgresResource(url=EnvVar("MESSENGER_DATABASE_URL"), variable="MESSENGER_DATABASE_URL")
    with DagsterInstance.ephemeral() as instance:

        def run(by_hand=None, ops=None, **options):
            job = build_call_timeout_reaper(CallTimeoutReaperOptions(**options), database)
            result = job.execute_in_process(
                instance=instance, raise_on_error=False, run_config=by_hand, op_selection=ops
            )
            return Run(result, instance)

        yield run


class TestARun:
    def test_closes_what_is_due(self, messenger, execute):
        messenger.add(
            a_ringing_call(age="46s"), an_answered_call(age="5h", last_sign_of_life="3h"), a_ringing_call(age="10s")
        )
        run = execute()
        assert run.success
        assert messenger.statuses() == {"Missed": 1, "Failed": 1, "Ringing": 1}
        assert len(messenger.outbox()) == 2
        assert [cycle["run_id"] for cycle in messenger.cycles()] == [run.run_id]
        assert messenger.locks() == []

    def test_with_nothing_due_succeeds(self, messenger, execute):
        run = execute()
        assert run.success
        assert run.values("write_outbox")["committed"] is True
        assert run.table("claim") == run.table("transition") == run.table("write_outbox", "outbox_rows") == []
        assert len(messenger.cycles()) == 1

    def test_shows_its_counts(self, messenger, execute):
        held, *_ = messenger.add(
            a_ringing_call(age="90s"),
            a_ringing_call(age="46s"),
            a_ringing_call(age="47s"),
            a_ringing_call(age="48s", end_reason="Hangup"),
            an_answered_call(age="5h", last_sign_of_life="3h"),
        )
        with messenger.holding("SELECT FROM messenger.call_sessions WHERE id = :id FOR UPDATE", id=held.id):
            run = execute()
        claimed = run.values("claim")
        assert claimed.pop("as_of").endswith("Z")
        assert claimed == {
            "ring_timeout_claimed": 3,
            "ring_timeout_skipped_locked": 1,
            "stale_answered_claimed": 1,
            "stale_answered_skipped_locked": 0,
            "remaining": 0,
            "retries": 0,
            "waiting_in_quarantine": 0,
        }
        assert run.values("transition") == {"missed": 2, "failed": 1, "poisoned": 1}
        written = run.values("write_outbox")
        assert 0 < written.pop("cycle_seconds") < 30
        assert written == {
            "committed": True,
            "missed": 2,
            "failed": 1,
            "poisoned": 1,
            "skipped_locked": 1,
            "remaining": 0,
        }

    def test_shows_its_calls(self, messenger, execute):
        missed, failed, poison = messenger.add(
            a_ringing_call(age="60s"),
            an_answered_call(age="5h", last_sign_of_life="3h"),
            a_ringing_call(age="50s", duration_seconds=9),
        )
        run = execute()
        assert run.columns("claim") == {
            "call_id": "string",
            "phase": "string",
            "started_at": "string",
            "overdue_seconds": "float",
        }
        rows = run.table("claim")
        assert [(row["call_id"], row["phase"]) for row in rows] == [
            (str(missed.id), "ring_timeout"),
            (str(poison.id), "ring_timeout"),
            (str(failed.id), "stale_answered"),
        ]
        assert 15 <= rows[0]["overdue_seconds"] < 40
        assert 3600 <= rows[2]["overdue_seconds"] < 3640
        assert run.table("transition") == [
            {
                "call_id": str(missed.id),
                "phase": "ring_timeout",
                "status_before": "Ringing",
                "status": "Missed",
                "end_reason": "Timeout",
            },
            {
                "call_id": str(failed.id),
                "phase": "stale_answered",
                "status_before": "Answered",
                "status": "Failed",
                "end_reason": "Error",
            },
        ]
        (rejected,) = run.table("transition", "poisoned_calls")
        assert (rejected["call_id"], rejected["phase"]) == (str(poison.id), "ring_timeout")
        assert "duration_seconds" in rejected["reason"]
        written = {row["call_id"]: row for row in run.table("write_outbox", "outbox_rows")}
        assert written.keys() == {str(missed.id), str(failed.id)}
        assert written[str(failed.id)]["kind"] == "CallEnded"
        assert written[str(failed.id)]["targets"] == f"user:{failed.caller_user_id}, user:{failed.callee_user_id}"
        (row,) = messenger.outbox(failed)
        assert written[str(failed.id)]["outbox_id"] == str(row["id"])

    def test_shows_no_more_than_a_page_of_rows_but_counts_them_all(self, messenger, execute):
        messenger.add_many(LONGEST_TABLE + 20)
        run = execute(batch_size=LONGEST_TABLE + 10, catch_up_batch_size=LONGEST_TABLE + 10)
        assert run.values("claim")["ring_timeout_claimed"] == LONGEST_TABLE + 10
        assert run.values("write_outbox")["missed"] == LONGEST_TABLE + 10
        for op, table in (("claim", "calls"), ("transition", "calls"), ("write_outbox", "outbox_rows")):
            assert len(run.table(op, table)) == LONGEST_TABLE
        assert messenger.statuses() == {"Missed": LONGEST_TABLE + 10, "Ringing": 10}


class TestADryRun:
    def test_shows_what_would_happen_and_leaves_everything_as_it_was(self, messenger, execute):
        missed, failed, poison = messenger.add(
            a_ringing_call(age="60s"),
            an_answered_call(age="5h", last_sign_of_life="3h"),
            a_ringing_call(age="50s", end_reason="Hangup"),
        )
        before = messenger.rows("SELECT * FROM messenger.call_sessions ORDER BY id")
        run = execute(by_hand={"dry_run": True})
        assert run.success
        assert run.tags[DRY_RUN_TAG] == "true"
        assert [row["call_id"] for row in run.table("claim")] == [str(missed.id), str(poison.id), str(failed.id)]
        assert [row["status"] for row in run.table("transition")] == ["Missed", "Failed"]
        assert [row["kind"] for row in run.table("write_outbox", "outbox_rows")] == ["CallMissed", "CallEnded"]
        assert [row["call_id"] for row in run.table("write_outbox", "poisoned_calls")] == [str(poison.id)]
        shown = run.values("write_outbox")
        assert (shown["committed"], shown["dry_run"]) == (False, "all of this was rolled back")
        assert (shown["missed"], shown["failed"], shown["poisoned"]) == (1, 1, 1)
        assert messenger.rows("SELECT * FROM messenger.call_sessions ORDER BY id") == before
        assert (messenger.outbox(), messenger.cycles(), messenger.locks()) == ([], [], [])
        assert messenger.value("SELECT count(*) FROM pin_jobs.quarantined_calls") == 0
        (error,) = [message for level, message in run.logs if level == logging.ERROR]
        assert "a dry run, which does not count" in error
        assert not [message for _, message in run.logs if "next cycle finds" in message]

    def test_is_not_what_a_run_is_by_default(self, messenger, execute):
        messenger.add(a_ringing_call(age="60s"))
        for run in (execute(), execute(by_hand={"dry_run": False})):
            assert DRY_RUN_TAG not in run.tags
            assert "dry_run" not in run.values("write_outbox")
        assert messenger.statuses() == {"Missed": 1}


class TestABatchSizeGivenByHand:
    def test_is_that_of_both_phases_whatever_else_is_due(self, messenger, execute):
        messenger.add(
            *[a_ringing_call(age="60s") for _ in range(4)],
            *[an_answered_call(age="5h", last_sign_of_life="3h") for _ in range(4)],
        )
        run = execute(by_hand={"batch_size": 1}, batch_size=2, catch_up_batch_size=3)
        assert (run.values("write_outbox")["missed"], run.values("write_outbox")["failed"]) == (1, 1)
        assert run.values("claim")["remaining"] == 6
        rest = execute(by_hand={"batch_size": 4}, batch_size=2, catch_up_batch_size=3)
        assert rest.values("write_outbox")["missed"] == 3


class TestARunOfSomeOps:
    @pytest.mark.parametrize("ops", [["claim"], ["claim", "transition"]])
    def test_fails_before_it_does_anything_rather_than_succeed_with_nothing_done(self, messenger, execute, ops):
        messenger.add(a_ringing_call(age="46s"))
        run = execute(ops=ops)
        assert not run.success
        assert run.failure == (
            "pin_jobs.messenger.ops.NotAWholeCycle: the three ops share one transaction and work together only: "
            "launch, or re-execute, all of them"
        )
        assert messenger.statuses() == {"Ringing": 1}

    def test_that_names_all_of_them_is_a_whole_one(self, messenger, execute):
        messenger.add(a_ringing_call(age="46s"))
        assert execute(ops=["claim", "transition", "write_outbox"]).success
        assert messenger.statuses() == {"Missed": 1}


class TestWhenTheLockIsBusy:
    def test_the_run_succeeds_with_the_rest_skipped_and_says_who_holds_it(self, messenger, execute):
        messenger.add(a_ringing_call(age="46s"))
        with messenger.holding(TAKE_RUN_LOCK, application_name="another-cycle"):
            run = execute()
        assert run.success
        assert run.skipped == {"transition", "write_outbox"}
        assert "another-cycle" in run.tags[LOCK_BUSY_TAG]
        assert " since " in run.tags[LOCK_BUSY_TAG]
        assert messenger.statuses() == {"Ringing": 1}
        assert messenger.cycles() == []
        assert execute().values("write_outbox")["missed"] == 1

    def test_a_run_that_gets_it_has_no_such_tag(self, execute):
        assert LOCK_BUSY_TAG not in execute().tags


class TestAFailure:
    @pytest.mark.parametrize(
        ("table", "event", "op"),
        [("call_sessions", "UPDATE", "transition"), ("realtime_outbox", "INSERT", "write_outbox")],
    )
    def test_in_the_middle_fails_the_run_and_commits_nothing(self, messenger, execute, table, event, op):
        messenger.add(a_ringing_call(age="46s"), an_answered_call(age="5h", last_sign_of_life="3h"))
        messenger.run(
            "CREATE FUNCTION messenger.refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION USING ERRCODE = 'XX001', MESSAGE = 'the host is broken'; END $$"
        )
        messenger.run(
            f"CREATE TRIGGER refuse BEFORE {event} ON messenger.{table} "
            "FOR EACH ROW EXECUTE FUNCTION messenger.refuse()"
        )
        run = execute()
        assert not run.success
        assert run.failed == {op}
        assert "the host is broken" in run.errors[0]
        assert any("nothing of it was committed" in message for _, message in run.logs)
        assert messenger.statuses() == {"Ringing": 1, "Answered": 1}
        assert (messenger.outbox(), messenger.cycles(), messenger.locks()) == ([], [], [])
        messenger.run(f"DROP TRIGGER refuse ON messenger.{table}")
        assert execute().values("write_outbox")["missed"] == 1

    def test_of_the_outbox_table_to_exist_fails_the_run_and_commits_nothing(self, messenger, execute):
        messenger.add(a_ringing_call(age="46s"))
        messenger.run("DROP TABLE messenger.realtime_outbox")
        run = execute()
        assert not run.success
        assert run.failed == {"write_outbox"}
        assert messenger.statuses() == {"Ringing": 1}
        assert (messenger.cycles(), messenger.locks()) == ([], [])

    def test_shows_neither_password_nor_rows_of_the_host(self, messenger, execute):
        (call,) = messenger.add(a_ringing_call(age="46s", media_type="Video"))
        messenger.run("ALTER TABLE messenger.call_sessions ADD CONSTRAINT never_missed CHECK (status <> 'Missed')")
        run = execute()
        (shown,) = run.table("transition", "poisoned_calls")
        (logged,) = [message for level, message in run.logs if level == logging.ERROR]
        for words in (shown["reason"], logged, messenger.value("SELECT last_error FROM pin_jobs.quarantined_calls")):
            assert "never_missed" in words
            assert "Failing row contains" not in words
            assert str(call.callee_user_id) not in words

    def test_of_the_database_to_answer_fails_the_run_in_one_line(self, execute, monkeypatch):
        monkeypatch.setenv("MESSENGER_DATABASE_URL", "postgresql://u:s3cr3t@127.0.0.1:1/messenger")
        run = execute()
        assert not run.success
        assert run.failed == {"claim"}
        assert "the messenger database cannot be reached" in run.errors[0]
        assert "s3cr3t" not in run.errors[0]

    def test_of_the_database_to_go_on_answering_fails_the_run_after_lock_ttl(self, messenger, execute, monkeypatch):
        messenger.add(a_ringing_call(age="46s"))
        with Breakpoint(messenger.jobs_url, "UPDATE messenger.call_sessions") as network:
            monkeypatch.setenv("MESSENGER_DATABASE_URL", network.url)
            run = execute(lock_ttl=timedelta(seconds=2), max_run_duration=timedelta(seconds=1.9))
        assert not run.success
        assert run.failed == {"transition"}
        assert "the messenger database cannot be reached: no answer for 2 s" in run.errors[0]
        assert messenger.statuses() == {"Ringing": 1}


def test_a_poison_call_is_logged_at_error_with_its_id(messenger, execute):
    (poison,) = messenger.add(a_ringing_call(age="48s", end_reason="Hangup"))
    run = execute()
    assert run.success
    (error,) = [message for level, message in run.logs if level == logging.ERROR]
    assert str(poison.id) in error


def test_the_job_is_named_as_documented():
    assert JOB_NAME == "call_timeout_reaper"
