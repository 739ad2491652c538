import re
from pathlib import Path

import pytest

import pin_jobs.messenger
from pin_jobs.messenger.calls import Phase
from pin_jobs.messenger.transaction import QUERIES
from pin_jobs.queries import MalformedQueryFile, load_queries

MESSENGER = Path(pin_jobs.messenger.__file__).parent
GOOD = """\
-- A comment on the whole file.

-- name: first
-- Why it is written so.
SELECT 1,
       '-- name: not_a_name' -- a comment at the end of a line

-- name: second
SELECT 2
  -- an indented comment
 WHERE true
"""


@pytest.fixture
def load(tmp_path):
    def parse(content: str):
        path = tmp_path / "queries.sql"
        path.write_text(content, encoding="utf-8")
        return load_queries(path)

    return parse


class TestTheParser:
    def test_reads_statements_by_name_without_their_comments(self, load):
        assert load(GOOD) == {
            "first": "SELECT 1,\n       '-- name: not_a_name' -- a comment at the end of a line",
            "second": "SELECT 2\n WHERE true",
        }

    def test_reads_a_file_without_statements(self, load):
        assert load("") == {}
        assert load("-- only a comment\n") == {}

    def test_keeps_other_alphabets(self, load):
        assert load("-- name: words\nSELECT 'звонок'\n") == {"words": "SELECT 'звонок'"}

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("SELECT 1\n-- name: late\nSELECT 2\n", r"queries\.sql:1: a statement without"),
            ("-- name:\nSELECT 1\n", r"queries\.sql:1: the name ''"),
            ("-- name: a-b\nSELECT 1\n", r"queries\.sql:1: the name 'a-b'"),
            ("-- name: 1st\nSELECT 1\n", r"queries\.sql:1: the name '1st'"),
            ("-- name: x\nSELECT 1\n-- name: x\nSELECT 2\n", r"queries\.sql:3: the name 'x'"),
            ("-- name: x\nSELECT 1\n-- name: two words\nSELECT 2\n", r"queries\.sql:3"),
            ("-- name: x\n-- name: y\nSELECT 2\n", "the statement 'x' is empty"),
            ("-- name: x\n-- only a comment\n", "the statement 'x' is empty"),
        ],
        ids=["text-before-a-name", "no-name", "bad-name", "digit-first", "twice", "two-words", "empty", "comment-only"],
    )
    def test_refuses_a_malformed_file_naming_the_place(self, load, content, words):
        with pytest.raises(MalformedQueryFile, match=words):
            load(content)


class TestTheStatementsOfTheMessenger:
    def test_are_all_used_and_all_there(self):
        code = "\n".join(path.read_text(encoding="utf-8") for path in MESSENGER.glob("*.py"))
        used = set(
            re.findall(r'(?:QUERIES(?:_WITHOUT_SCHEMA\))?\[|\.rows\(|\.value\(|\.run\(|\._undo\()\s*"(\w+)"', code)
        )
        used |= {f"claim_{phase}{kind}" for phase in Phase for kind in ("", "_retries")}
        assert used == set(QUERIES)

    @pytest.mark.parametrize("name", QUERIES)
    def test_have_no_double_colon_for_it_would_be_read_as_a_bind(self, name):
        assert "::" not in QUERIES[name].text

    @pytest.mark.parametrize("name", QUERIES)
    def test_are_explained(self, name):
        lines = (MESSENGER / "queries.sql").read_text(encoding="utf-8").splitlines()
        assert lines[lines.index(f"-- name: {name}") + 1].startswith("-- ")

    @pytest.mark.parametrize("name", QUERIES)
    def test_name_every_table_with_its_schema(self, name):
        tables = re.findall(r"\b(?:FROM|JOIN|(?<!DO )UPDATE|INTO)\s+(?!unnest|LATERAL|\()([\w.]+)", QUERIES[name].text)
        unqualified = {table for table in tables if "." not in table}
        assert unqualified <= {
            "pg_locks",
            "pg_stat_activity",
            "pg_database",
            "pg_roles",
            "SKIP",
            "OF",
            "clock_timestamp",
        }
