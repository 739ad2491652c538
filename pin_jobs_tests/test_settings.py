import traceback
from datetime import timedelta

import pytest

from pin_jobs.database import InvalidDatabaseUrl
from pin_jobs.errors import PinJobsError
from pin_jobs.options import InvalidOption
from pin_jobs.settings import InvalidSetting, NothingConfigured, Settings

MESSENGER = {"MESSENGER_DATABASE_URL": "postgresql://u:s3cr3t@h/messenger"}
CHATHOUSE = {
    "CHATHOUSE_DATABASE_URL": "postgresql://u:s3cr3t@h/chathouse",
    "REDIS_URL": "redis://:s3cr3t@h",
    "DIALOG_API_URL": "https://h",
    "DIALOG_API_TOKEN": "s3cr3t",
}


def read(*parts: dict[str, str], **variables: str) -> Settings:
    environ: dict[str, str] = {}
    for part in parts:
        environ |= part
    return Settings.from_environment(environ | variables)


def refusal(kind: type[PinJobsError], **variables: str) -> str:
    with pytest.raises(kind) as error:
        read(MESSENGER, **variables)
    assert "s3cr3t" not in "".join(traceback.format_exception(error.value))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("parts", "has_messenger", "has_chathouse"),
    [([MESSENGER], True, False), ([CHATHOUSE], False, True), ([MESSENGER, CHATHOUSE], True, True)],
    ids=["messenger", "chathouse", "both"],
)
def test_a_context_is_there_when_its_database_is_configured(parts, has_messenger, has_chathouse):
    settings = read(*parts)
    assert (settings.has_messenger, settings.has_chathouse) == (has_messenger, has_chathouse)


@pytest.mark.parametrize("empty", [{}, {"MESSENGER_DATABASE_URL": "", "CHATHOUSE_DATABASE_URL": "  "}])
def test_nothing_configured_is_one_error_that_names_both_variables(empty):
    with pytest.raises(NothingConfigured) as error:
        read(empty)
    assert "MESSENGER_DATABASE_URL" in str(error.value)
    assert "CHATHOUSE_DATABASE_URL" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["REDIS_URL", "DIALOG_API_URL", "DIALOG_API_TOKEN"])
def test_the_chathouse_needs_the_rest_too(missing):
    with pytest.raises(
        InvalidSetting, match=rf"CHATHOUSE_DATABASE_URL is set, and post_chat_mail needs {missing} too$"
    ):
        read(CHATHOUSE, **{missing: ""})


def test_a_host_with_an_adapter_of_its_own_needs_no_dialog_api():
    environ = {name: value for name, value in CHATHOUSE.items() if not name.startswith("DIALOG_API")}
    assert read(environ, DIALOG_API_ADAPTER="our_crm.mails:Crm").has_own_dialog_api


def test_an_option_of_the_post_chat_mail_out_of_its_range_is_refused():
    words = refusal(InvalidOption, POST_CHAT_MAIL_SENSOR_SHARDS="0")
    assert words == "POST_CHAT_MAIL_SENSOR_SHARDS is 0; allowed is 1 to 64"


def test_an_empty_url_counts_as_not_set():
    assert not read(CHATHOUSE, MESSENGER_DATABASE_URL=" ").has_messenger


@pytest.mark.parametrize("variable", ["MESSENGER_DATABASE_URL", "CHATHOUSE_DATABASE_URL"])
@pytest.mark.parametrize("value", ["mysql://u:s3cr3t@h/d", "s3cr3t", "postgresql://u:s3cr3t@h"])
def test_a_bad_database_url_is_refused_by_name_and_never_shown(variable, value):
    assert refusal(InvalidDatabaseUrl, **{variable: value}).startswith(f"{variable} is not a PostgreSQL URL")


@pytest.mark.parametrize("value", ["redis://h:6379/0", "rediss://:s3cr3t@h", "unix:///run/redis.sock", ""])
def test_a_redis_url_is_accepted(value):
    assert read(MESSENGER, REDIS_URL=value).has_messenger


@pytest.mark.parametrize(
    "value", ["http://u:s3cr3t@h", "s3cr3t", "redis://", "redis://:s3cr3t@h:port", "redis://[s3cr3t"]
)
def test_a_bad_redis_url_is_refused_by_name_and_never_shown(value):
    assert refusal(InvalidSetting, REDIS_URL=value).startswith("REDIS_URL is not a URL of the form redis://...")


@pytest.mark.parametrize("value", ["http://h", "https://h:8443/api", ""])
def test_an_address_of_the_dialog_api_is_accepted(value):
    assert read(MESSENGER, DIALOG_API_URL=value).has_messenger


@pytest.mark.parametrize("value", ["ftp://u:s3cr3t@h", "s3cr3t", "https://", "https://u:s3cr3t@h:99999"])
def test_a_bad_address_of_the_dialog_api_is_refused_by_name_and_never_shown(value):
    assert refusal(InvalidSetting, DIALOG_API_URL=value).startswith("DIALOG_API_URL is not a URL of the form http://")


@pytest.mark.parametrize(
    "value", ["https://u:s3cr3t@h", "https://s3cr3t@h", "https://h/?key=s3cr3t", "https://h#s3cr3t"]
)
def test_an_address_of_the_dialog_api_that_holds_a_secret_is_refused_and_never_shown(value):
    assert refusal(InvalidSetting, DIALOG_API_URL=value) == (
        "DIALOG_API_URL holds more than host, port and path; the token belongs in DIALOG_API_TOKEN"
    )


@pytest.mark.parametrize("value", ["crm:Api", "crm.dialogs:make_api", ""])
def test_an_adapter_is_named_by_module_and_name(value):
    assert read(MESSENGER, DIALOG_API_ADAPTER=value).has_messenger


@pytest.mark.parametrize("value", ["crm", "crm:", ":Api", "crm/dialogs:Api", "crm:Api()"])
def test_an_adapter_of_another_form_is_refused(value):
    assert "its form is package.module:name" in refusal(InvalidSetting, DIALOG_API_ADAPTER=value)


@pytest.mark.parametrize(
    ("value", "run"),
    [(None, True), ("", True), ("running", True), ("Running ", True), ("stopped", False), (" STOPPED", False)],
)
def test_sensors_run_unless_told_otherwise(value, run):
    variables = {} if value is None else {"PIN_JOBS_SENSORS": value}
    assert read(MESSENGER, **variables).sensors_run is run


@pytest.mark.parametrize("value", ["off", "0", "true", "runing"])
def test_another_word_for_the_sensors_is_refused(value):
    assert refusal(InvalidSetting, PIN_JOBS_SENSORS=value) == (
        f"PIN_JOBS_SENSORS is {value!r}; allowed is running or stopped"
    )


def test_options_are_read_and_checked_with_the_rest():
    settings = read(MESSENGER, CALL_TIMEOUT_REAPER_RING_TIMEOUT="PT1M")
    assert settings.call_timeout_reaper.ring_timeout == timedelta(minutes=1)
    assert "CALL_TIMEOUT_REAPER_RING_TIMEOUT is 0s" in refusal(InvalidOption, CALL_TIMEOUT_REAPER_RING_TIMEOUT="0")


def test_settings_hold_no_secret():
    assert "s3cr3t" not in repr(read(MESSENGER, CHATHOUSE, REDIS_URL="redis://:s3cr3t@h"))
