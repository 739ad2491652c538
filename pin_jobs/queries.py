"""Reads the `queries.sql` files: every statement of a context in one place, named and explained."""

import re
from collections.abc import Mapping
from pathlib import Path

from pin_jobs.errors import PinJobsError

_NAME = re.compile(r"^--\s*name:\s*(?P<name>.*?)\s*$")


class MalformedQueryFile(PinJobsError):
    """A queries.sql breaks the format: `-- name: x`, comment lines, one statement."""


def load_queries(path: Path) -> Mapping[str, str]:
    """Return the statements of a file by name, comments stripped.

    A statement begins at a line `-- name: the_name`; the comment lines below it say why it is written so. Text before
    the first name is a comment on the whole file.

    Raises:
        MalformedQueryFile: a name is missing, bad or used twice, or a statement is empty.
    """
    statements: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if match := _NAME.match(line):
            name = match["name"]
            if not name.isidentifier() or name in statements:
                raise MalformedQueryFile(f"{path.name}:{number}: the name {name!r} is no identifier or is used twice")
            current = statements[name] = []
        elif line.strip() and not line.lstrip().startswith("--"):
            if current is None:
                raise MalformedQueryFile(f"{path.name}:{number}: a statement without a `-- name:` line above it")
            current.append(line)
    for name, lines in statements.items():
        if not lines:
            raise MalformedQueryFile(f"{path.name}: the statement {name!r} is empty")
    return {name: "\n".join(lines).strip() for name, lines in statements.items()}
