import os
import subprocess
import sys
import uuid
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from pin_jobs.cli import main
from pin_jobs_tests.conftest import PREFIXES, ROLE_PASSWORD
from pin_jobs_tests.factories import Messenger, a_ringing_call

LEFT_OUT = "chathouse: left out, CHATHOUSE_DATABASE_URL is not set\n"
UNREACHABLE = "postgresql://u:s3cr3t@127.0.0.1:1/d"


@pytest.fixture
def pin_jobs(monkeypatch):
    """The command line, in this process, with the variables given and no other of ours."""

    def run(*arguments: str, **variables: str):
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(PREFIXES)]:
                patch.delenv(name)
            return CliRunner().invoke(main, list(arguments), env=dict(variables))

    return run


def spawn(*arguments: str, **variables: str):
    """The command line as a person runs it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    program = Path(sys.executable).with_name("pin-jobs")
    return subprocess.Popen(
        [program, *arguments],
        env={**inherited, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TestMigrate:
    def test_says_what_it_did(self, pin_jobs, empty_database):
        first = pin_jobs("migrate", MESSENGER_DATABASE_URL=empty_database)
        assert (first.exit_code, first.output) == (0, f"messenger: no schema -> 0002\n{LEFT_OUT}")
        second = pin_jobs("migrate", MESSENGER_DATABASE_URL=empty_database)
        assert (second.exit_code, second.output) == (0, f"messenger: at 0002, nothing to do\n{LEFT_OUT}")

    def test_with_one_database_for_both_contexts_works(self, pin_jobs, empty_database):
        variables = {"MESSENGER_DATABASE_URL": empty_database, "CHATHOUSE_DATABASE_URL": empty_database}
        assert pin_jobs("migrate", **variables).exit_code == 0
        again = pin_jobs("migrate", **variables)
        assert again.exit_code == 0
        assert "nothing to do" in again.output

    def test_leaves_out_what_is_not_configured_and_says_so(self, pin_jobs, empty_database):
        result = pin_jobs("migrate", CHATHOUSE_DATABASE_URL=empty_database)
        assert result.exit_code == 0
        assert "messenger: left out, MESSENGER_DATABASE_URL is not set" in result.output

    @pytest.mark.parametrize("variables", [{}, {"MESSENGER_DATABASE_URL": "", "CHATHOUSE_DATABASE_URL": " "}])
    def test_with_nothing_configured_names_both_variables(self, pin_jobs, variables):
        result = pin_jobs("migrate", **variables)
        assert result.exit_code == 1
        assert "MESSENGER_DATABASE_URL" in result.output
        assert "CHATHOUSE_DATABASE_URL" in result.output
        assert result.output.startswith("Error: no database is configured")
        assert result.output.count("\n") == 1

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            (UNREACHABLE, "Error: the messenger database cannot be reached: "),
            ("mysql://u:s3cr3t@h/d", "Error: MESSENGER_DATABASE_URL is not a PostgreSQL URL"),
        ],
    )
    def test_fails_in_one_line_without_the_password(self, pin_jobs, url, words):
        result = pin_jobs("migrate", MESSENGER_DATABASE_URL=url)
        assert result.exit_code == 1
        assert result.output.startswith(words)
        assert result.output.count("\n") == 1
        assert "s3cr3t" not in result.output

    def test_after_a_newer_version_fails_in_one_line(self, pin_jobs, messenger):
        messenger.run("UPDATE pin_jobs.alembic_version_messenger SET version_num = '9999'")
        result = pin_jobs("migrate", MESSENGER_DATABASE_URL=messenger.url)
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert "9999" in result.output
        assert result.output.count("\n") == 1


class TestCheck:
    def test_of_a_database_that_has_all_says_so(self, pin_jobs, messenger):
        result = pin_jobs("check", MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert (result.exit_code, result.output) == (
            0,
            f"ok: messenger: the database has all that call_timeout_reaper needs\n{LEFT_OUT}",
        )

    def test_with_warnings_only_succeeds(self, pin_jobs, messenger):
        messenger.run("DROP INDEX messenger.ix_call_active")
        result = pin_jobs("check", MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert result.exit_code == 0
        assert result.output.startswith("warning: messenger: no index serves ")
        assert result.output.endswith(LEFT_OUT)
        assert result.output.count("\n") == 2

    def test_with_an_error_fails_and_names_every_difference(self, pin_jobs, messenger):
        messenger.run("DROP TABLE messenger.realtime_outbox")
        messenger.run("DROP INDEX messenger.ix_call_active")
        messenger.run("ALTER TABLE messenger.call_sessions DROP COLUMN end_reason")
        result = pin_jobs("check", MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert result.exit_code == 1
        assert result.output.splitlines() == [
            "error: messenger: messenger.call_sessions has no column end_reason (text)",
            "error: messenger: messenger.realtime_outbox is missing",
            LEFT_OUT.strip(),
        ]

    def test_of_a_database_that_is_away_fails_in_one_line(self, pin_jobs):
        result = pin_jobs("check", MESSENGER_DATABASE_URL=UNREACHABLE)
        assert result.exit_code == 1
        assert result.output.startswith("error: messenger: the messenger database cannot be reached: ")
        assert result.output.endswith(LEFT_OUT)
        assert result.output.count("\n") == 2
        assert "s3cr3t" not in result.output

    def test_refuses_an_option_out_of_its_range(self, pin_jobs, messenger):
        result = pin_jobs("check", MESSENGER_DATABASE_URL=messenger.jobs_url, CALL_TIMEOUT_REAPER_LOCK_TTL="5")
        assert result.exit_code == 1
        assert result.output.startswith("Error: CALL_TIMEOUT_REAPER_LOCK_TTL is 5s; allowed is ")

    def test_with_nothing_configured_names_the_variables(self, pin_jobs):
        result = pin_jobs("check")
        assert result.exit_code == 1
        assert "MESSENGER_DATABASE_URL" in result.output


class TestCheckOfTheChathouse:
    @pytest.fixture
    def variables(self, chathouse, valkey_url, dialog_api):
        return {
            "CHATHOUSE_DATABASE_URL": chathouse.jobs_url,
            "REDIS_URL": valkey_url,
            "DIALOG_API_URL": dialog_api.url,
            "DIALOG_API_TOKEN": dialog_api.token,
        }

    def test_that_has_all_says_so_of_each_part(self, pin_jobs, variables):
        result = pin_jobs("check", **variables)
        assert (result.exit_code, result.output.splitlines()) == (
            0,
            [
                "messenger: left out, MESSENGER_DATABASE_URL is not set",
                "ok: chathouse: the database has all that post_chat_mail needs",
                "ok: chathouse: Redis can be read and written",
                "ok: chathouse: the dialog API answers",
            ],
        )

    def test_shows_both_contexts_and_fails_when_either_would_break(self, pin_jobs, messenger, chathouse, variables):
        variables["MESSENGER_DATABASE_URL"] = messenger.jobs_url
        assert pin_jobs("check", **variables).exit_code == 0
        messenger.run("DROP TABLE messenger.realtime_outbox")
        result = pin_jobs("check", **variables)
        assert result.exit_code == 1
        assert [line.rpartition(": ")[0] for line in result.output.splitlines()] == [
            "error: messenger",
            *["ok: chathouse"] * 3,
        ]
        variables["MESSENGER_DATABASE_URL"] = ""
        chathouse.run("ALTER TABLE chathouse.inmails DROP COLUMN sent_at")
        result = pin_jobs("check", **variables)
        assert result.exit_code == 1
        assert "error: chathouse: chathouse.inmails has no column sent_at (timestamptz)\n" in result.output

    def test_that_is_away_fails_for_the_database_and_warns_of_the_rest(self, pin_jobs):
        result = pin_jobs(
            "check",
            CHATHOUSE_DATABASE_URL=UNREACHABLE,
            REDIS_URL="redis://:s3cr3t@127.0.0.1:1/0",
            DIALOG_API_URL="http://127.0.0.1:1",
            DIALOG_API_TOKEN="s3cr3t",
        )
        assert result.exit_code == 1
        _, database, redis, dialog_api = result.output.splitlines()
        assert database.startswith("error: chathouse: the chathouse database cannot be reached: ")
        assert redis.startswith("warning: chathouse: Redis cannot be reached: checks go on without it")
        assert dialog_api.startswith("warning: chathouse: the dialog API gives no answer (cannot be reached")
        assert "s3cr3t" not in result.output

    def test_with_only_redis_and_the_dialog_api_away_succeeds(self, pin_jobs, variables):
        variables |= {"REDIS_URL": "redis://127.0.0.1:1/0", "DIALOG_API_URL": "http://127.0.0.1:1"}
        result = pin_jobs("check", **variables)
        assert result.exit_code == 0
        assert [line.partition(":")[0] for line in result.output.splitlines()[1:]] == ["ok", "warning", "warning"]

    def test_with_a_token_that_is_refused_fails(self, pin_jobs, variables):
        result = pin_jobs("check", **{**variables, "DIALOG_API_TOKEN": "s3cr3t"})
        assert result.exit_code == 1
        assert "error: chathouse: the token is refused by the dialog API (HTTP 401)" in result.output
        assert "s3cr3t" not in result.output

    def test_with_an_adapter_makes_it_and_asks_nobody(self, pin_jobs, variables, dialog_api, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        Path("crm_of_the_host.py").write_text("class Crm:\n    def mail_limit(self, *_): raise ValueError\n")
        for adapter, code, line in (
            ("crm_of_the_host:Crm", 0, "ok: chathouse: the adapter of the dialog API can be made; it was not asked"),
            ("crm_of_the_host:Gone", 1, "error: chathouse: the adapter crm_of_the_host:Gone of the dialog API cannot"),
        ):
            result = pin_jobs("check", **{**variables, "DIALOG_API_ADAPTER": adapter})
            assert result.exit_code == code
            assert result.output.splitlines()[-1].startswith(line)
        assert dialog_api.asked == []

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"REDIS_URL": ""}, "CHATHOUSE_DATABASE_URL is set, and post_chat_mail needs REDIS_URL too"),
            ({"DIALOG_API_TOKEN": ""}, "CHATHOUSE_DATABASE_URL is set, and post_chat_mail needs DIALOG_API_TOKEN too"),
            ({"DIALOG_API_URL": "http://u:s3cr3t@h"}, "DIALOG_API_URL holds more than host, port and path"),
            ({"POST_CHAT_MAIL_SILENCE": "61 days"}, "POST_CHAT_MAIL_SILENCE is '61 days'"),
        ],
    )
    def test_with_settings_that_do_not_load_fails_in_one_line(self, pin_jobs, variables, change, words):
        result = pin_jobs("check", **{**variables, **change})
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {words}")
        assert result.output.count("\n") == 1
        assert "s3cr3t" not in result.output


class TestQuarantine:
    @pytest.fixture
    def poison(self, messenger, reap):
        calls = messenger.add(*[a_ringing_call("10min", end_reason="Hangup") for _ in range(3)])
        assert reap().poisoned == 3
        return [str(call.id) for call in calls]

    def test_list_of_nothing_says_so(self, pin_jobs, messenger):
        result = pin_jobs("quarantine", "list", MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert (result.exit_code, result.output) == (0, "No call is in quarantine.\n")

    def test_list_has_a_line_for_every_call_in_columns(self, pin_jobs, messenger, poison):
        result = pin_jobs("quarantine", "list", MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert result.exit_code == 0
        heading, *lines = result.output.splitlines()
        assert heading.split("  ")[0] == "call"
        assert sorted(line.split()[0] for line in lines) == sorted(poison)
        column = heading.index("last error")
        assert {line[column:] for line in lines} == {"it is Ringing but already has end_reason"}
        assert {line[heading.index("attempts") :].split()[0] for line in lines} == {"1"}

    def test_release_of_some_names_those_that_were_not_there_and_fails(self, pin_jobs, messenger, poison):
        unknown = str(uuid.uuid4())
        result = pin_jobs("quarantine", "release", poison[0], unknown, MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert result.exit_code == 1
        assert result.output.splitlines() == [
            "1 released; the next cycle takes it like any other.",
            f"Error: not in quarantine: {unknown}",
        ]
        assert messenger.value("SELECT count(*) FROM pin_jobs.quarantined_calls") == 2

    @pytest.mark.usefixtures("poison")
    def test_release_of_all_says_how_many(self, pin_jobs, messenger):
        result = pin_jobs("quarantine", "release", "--all", MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert (result.exit_code, result.output) == (0, "3 released; the next cycle takes them like any other.\n")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), "name the calls to release, or say --all"),
            (("--all", "0b7b1c6e-0000-4000-8000-000000000001"), "name the calls to release, or say --all"),
            (("not-an-id",), "'not-an-id' is not a valid UUID"),
        ],
    )
    def test_release_of_nonsense_is_refused(self, pin_jobs, messenger, poison, arguments, words):
        result = pin_jobs("quarantine", "release", *arguments, MESSENGER_DATABASE_URL=messenger.jobs_url)
        assert result.exit_code == 2
        assert words in result.output
        assert messenger.value("SELECT count(*) FROM pin_jobs.quarantined_calls") == len(poison)

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            (None, "Error: MESSENGER_DATABASE_URL is not set"),
            (UNREACHABLE, "Error: the messenger database cannot be reached: "),
        ],
    )
    def test_without_a_database_fails_in_one_line(self, pin_jobs, url, words):
        result = pin_jobs("quarantine", "list", **({"MESSENGER_DATABASE_URL": url} if url else {}))
        assert result.exit_code == 1
        assert result.output.startswith(words)
        assert "s3cr3t" not in result.output


class TestTheProgram:
    def test_migrates_however_many_are_started_at_once(self, empty_database):
        processes = [spawn("migrate", MESSENGER_DATABASE_URL=empty_database) for _ in range(4)]
        outputs = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, outputs
        assert sorted(out for out, _ in outputs) == [
            *[f"messenger: at 0002, nothing to do\n{LEFT_OUT}"] * 3,
            f"messenger: no schema -> 0002\n{LEFT_OUT}",
        ]
        assert [err for _, err in outputs] == [""] * 4

    def test_shows_no_traceback_and_no_password(self, server, empty_database):
        url = server.url(Messenger(empty_database).value("SELECT current_database()"), role=server.create_role())
        for broken in (UNREACHABLE, url):
            process = spawn("migrate", MESSENGER_DATABASE_URL=broken)
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out) == (1, "")
            assert err.startswith("Error: the messenger database ")
            assert err.count("\n") == 1
            assert "s3cr3t" not in err
            assert ROLE_PASSWORD not in err


class TestTheRest:
    @pytest.mark.parametrize("flag", ["-h", "--help"])
    def test_help_names_the_commands(self, pin_jobs, flag):
        result = pin_jobs(flag)
        assert result.exit_code == 0
        assert "migrate" in result.output
        assert "dev" in result.output

    def test_version_is_that_of_the_package(self, pin_jobs):
        result = pin_jobs("--version")
        assert result.exit_code == 0
        assert result.output.endswith(f"version {metadata.version('pin-jobs')}\n")

    @pytest.mark.parametrize("port", ["0", "65536", "abc"])
    def test_a_bad_port_is_refused_before_anything_starts(self, pin_jobs, port):
        result = pin_jobs("dev", "--port", port)
        assert result.exit_code == 2
        assert "--port" in result.output
