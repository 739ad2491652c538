from datetime import date, timedelta

import pytest

from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs.options import InvalidOption

PREFIX = "CALL_TIMEOUT_REAPER_"
MICROSECOND = timedelta(microseconds=1)


def read(**variables: str) -> CallTimeoutReaperOptions:
    return CallTimeoutReaperOptions.from_environment({PREFIX + name: value for name, value in variables.items()})


def refusal(**variables: str) -> str:
    with pytest.raises(InvalidOption) as error:
        read(**variables)
    message = str(error.value)
    assert "\n" not in message
    return message


class TestDefaults:
    def test_are_those_of_the_document(self):
        assert vars(read()) == {
            "ring_timeout": timedelta(seconds=45),
            "stale_answered_timeout": timedelta(hours=2),
            "polling_interval": timedelta(seconds=15),
            "batch_size": 200,
            "backfill_first_day": date(2024, 1, 1),
            "backfill_batch_size": 100_000,
            "catch_up_batch_size": 5000,
            "lock_ttl": timedelta(seconds=60),
            "max_run_duration": timedelta(seconds=30),
        }

    def test_give_the_windows_of_the_rules(self):
        windows = CallTimeoutReaperOptions().windows
        assert (windows.ring, windows.stale_answered) == (timedelta(seconds=45), timedelta(hours=2))

    @pytest.mark.parametrize("empty", ["", " ", "\t\n"])
    def test_stand_in_for_empty_variables(self, empty):
        assert read(RING_TIMEOUT=empty, BATCH_SIZE=empty, LOCK_TTL=empty) == read()

    def test_stand_in_even_for_an_empty_variable_that_is_unknown(self):
        assert read(NO_SUCH_OPTION="") == read()

    def test_are_not_touched_by_other_variables(self):
        assert CallTimeoutReaperOptions.from_environment({"PATH": "x", "RING_TIMEOUT": "3"}) == read()


class TestDurations:
    @pytest.mark.parametrize(
        ("written", "seconds"),
        [
            ("50", 50),
            (" 50 ", 50),
            ("50.5", 50.5),
            ("00:00:50", 50),
            ("0:00:50", 50),
            ("00:01:00", 60),
            ("01:00:00", 3600),
            ("00:00:50.25", 50.25),
            ("PT50S", 50),
            ("PT1M", 60),
            ("PT1H", 3600),
            ("PT1M30.5S", 90.5),
        ],
    )
    def test_are_seconds_a_clock_or_iso_8601(self, written, seconds):
        assert read(RING_TIMEOUT=written).ring_timeout == timedelta(seconds=seconds)

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("P1D", timedelta(days=1)),
            ("P1DT12H", timedelta(days=1.5)),
            ("24:00:00", timedelta(days=1)),
            ("36:00:00", timedelta(hours=36)),
            ("100:00:00", timedelta(hours=100)),
            ("86400", timedelta(days=1)),
        ],
    )
    def test_may_be_days(self, written, expected):
        assert read(STALE_ANSWERED_TIMEOUT=written).stale_answered_timeout == expected

    @pytest.mark.parametrize(
        "written",
        [
            "abc",
            "45s",
            "45 s",
            "-45",
            "-00:00:45",
            "-PT45S",
            "00:45",
            "00:00:60",
            "00:60:00",
            "45,5",
            "1e3",
            "nan",
            "inf",
            "infinity",
            "P",
            "PT",
            "PTS",
            "pt45s",
            "0x10",
            "\uff14\uff15",
            "true",
            "None",
        ],
    )
    def test_of_another_form_are_refused(self, written):
        message = refusal(RING_TIMEOUT=written)
        assert (
            message == f"CALL_TIMEOUT_REAPER_RING_TIMEOUT is {written!r}; allowed is a duration: 45, 00:00:45 or PT45S"
        )

    @pytest.mark.parametrize("written", ["9" * 30, "9" * 400, "P" + "9" * 30 + "D", "99999999:00:00"])
    def test_beyond_all_measure_are_refused(self, written):
        message = refusal(STALE_ANSWERED_TIMEOUT=written)
        assert message.startswith("CALL_TIMEOUT_REAPER_STALE_ANSWERED_TIMEOUT is ")
        assert "allowed is" in message
        assert len(message) < 200


class TestNumbers:
    def test_are_whole(self):
        assert read(BATCH_SIZE=" 150 ").batch_size == 150

    @pytest.mark.parametrize(
        "written", ["abc", "1.5", "1e2", "1_000", "0x10", "9" * 30, "\uff12\uff10\uff10", "1 000", "true"]
    )
    def test_of_another_form_are_refused(self, written):
        assert refusal(BATCH_SIZE=written) == (
            f"CALL_TIMEOUT_REAPER_BATCH_SIZE is {written!r}; allowed is a whole number"
        )


class TestRanges:
    @pytest.mark.parametrize(
        ("accepted", "refused", "words"),
        [
            (
                {"ring_timeout": MICROSECOND},
                {"ring_timeout": timedelta(0)},
                "RING_TIMEOUT is 0s; allowed is more than 0",
            ),
            (
                {"ring_timeout": timedelta(days=36_499), "stale_answered_timeout": timedelta(days=36_500)},
                {"ring_timeout": timedelta(days=36_499), "stale_answered_timeout": timedelta(days=36_501)},
                "STALE_ANSWERED_TIMEOUT",
            ),
            (
                {"stale_answered_timeout": timedelta(seconds=45) + MICROSECOND},
                {"stale_answered_timeout": timedelta(seconds=45)},
                "STALE_ANSWERED_TIMEOUT is 45s; allowed is more than ring_timeout (45s)",
            ),
            (
                {"polling_interval": timedelta(seconds=5)},
                {"polling_interval": timedelta(seconds=4)},
                "POLLING_INTERVAL is 4s; allowed is 5s to 1 day",
            ),
            (
                {"polling_interval": timedelta(days=1)},
                {"polling_interval": timedelta(days=1, seconds=1)},
                "POLLING_INTERVAL is 86401s; allowed is 5s to 1 day",
            ),
            ({"batch_size": 1}, {"batch_size": 0}, "BATCH_SIZE is 0; allowed is 1 to 10000"),
            (
                {"batch_size": 10_000, "catch_up_batch_size": 10_000},
                {"batch_size": 10_001, "catch_up_batch_size": 10_001},
                "BATCH_SIZE is 10001; allowed is 1 to 10000",
            ),
            ({"backfill_batch_size": 1}, {"backfill_batch_size": 0}, "BACKFILL_BATCH_SIZE is 0; allowed is 1 to"),
            (
                {"catch_up_batch_size": 200},
                {"catch_up_batch_size": 199},
                "CATCH_UP_BATCH_SIZE is 199; allowed is batch_size (200) to",
            ),
            (
                {"lock_ttl": timedelta(seconds=30) + MICROSECOND},
                {"lock_ttl": timedelta(seconds=30)},
                "LOCK_TTL is 30s; allowed is more than max_run_duration (30s)",
            ),
            (
                {"lock_ttl": timedelta(days=24)},
                {"lock_ttl": timedelta(days=24) + timedelta(seconds=1)},
                "LOCK_TTL is 2073601s; allowed is",
            ),
            (
                {"max_run_duration": MICROSECOND},
                {"max_run_duration": timedelta(0)},
                "MAX_RUN_DURATION is 0s; allowed is more than 0",
            ),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_include_their_bound_and_nothing_beyond(self, accepted, refused, words):
        CallTimeoutReaperOptions(**accepted)
        with pytest.raises(InvalidOption) as error:
            CallTimeoutReaperOptions(**refused)
        assert PREFIX + words in str(error.value)

    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            ({"RING_TIMEOUT": "0"}, "CALL_TIMEOUT_REAPER_RING_TIMEOUT is 0s"),
            ({"RING_TIMEOUT": "3:00:00"}, "STALE_ANSWERED_TIMEOUT is 7200s (the default); allowed is more than"),
            ({"BATCH_SIZE": "-1"}, "CALL_TIMEOUT_REAPER_BATCH_SIZE is -1; allowed is 1 to 10000"),
            ({"BATCH_SIZE": "6000"}, "CATCH_UP_BATCH_SIZE is 5000 (the default); allowed is batch_size (6000) to"),
            ({"MAX_RUN_DURATION": "60"}, "LOCK_TTL is 60s (the default); allowed is more than max_run_duration (60s)"),
            ({"POLLING_INTERVAL": "PT4.999S"}, "POLLING_INTERVAL is 4.999s; allowed is 5s to"),
        ],
    )
    def test_are_checked_when_the_environment_is_read(self, variables, words):
        assert words in refusal(**variables)

    def test_of_options_that_depend_on_each_other_may_move_together(self):
        options = read(RING_TIMEOUT="3:00:00", STALE_ANSWERED_TIMEOUT="4:00:00", MAX_RUN_DURATION="90", LOCK_TTL="91")
        assert options.ring_timeout == timedelta(hours=3)
        assert options.max_run_duration == timedelta(seconds=90)

    def test_may_be_the_strict_behaviour_of_one_batch_a_cycle(self):
        assert read(CATCH_UP_BATCH_SIZE="200").catch_up_batch_size == 200


class TestUnknownOptions:
    @pytest.mark.parametrize(
        ("typo", "meant"),
        [("RING_TIMOUT", "RING_TIMEOUT"), ("BATCHSIZE", "BATCH_SIZE"), ("LOCK_TLL", "LOCK_TTL")],
    )
    def test_are_refused_with_what_was_meant(self, typo, meant):
        assert refusal(**{typo: "3"}) == (
            f"{PREFIX}{typo} is not an option of the call timeout reaper; did you mean {PREFIX}{meant}?"
        )

    def test_that_resemble_none_are_refused_with_all_there_are(self):
        message = refusal(**{"Z" * 50: "1"})
        for option in vars(CallTimeoutReaperOptions()):
            assert PREFIX + option.upper() in message


class TestInWords:
    def test_every_option_is_shown_exactly(self):
        options = CallTimeoutReaperOptions(stale_answered_timeout=timedelta(days=14, milliseconds=250))
        words = options.in_words()
        assert words.keys() == vars(options).keys()
        assert words["ring_timeout"] == "45s"
        assert words["batch_size"] == "200"
        assert words["stale_answered_timeout"] == "1209600.25s"


def test_a_refusal_is_an_error_of_ours():
    assert issubclass(InvalidOption, PinJobsError)
