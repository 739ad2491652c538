"""Options of a job: a frozen dataclass, read from the environment and refused early."""

import difflib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import date, timedelta
from typing import Any, ClassVar, Final, Self

from pydantic import TypeAdapter, ValidationError

from pin_jobs.errors import PinJobsError

_DURATION_FORMS: Final = re.compile(r"[0-9]+(\.[0-9]+)?|[0-9]+:[0-5][0-9]:[0-5][0-9](\.[0-9]+)?|P[0-9.A-Z]+")
_DURATION: Final = TypeAdapter(timedelta)


class InvalidOption(PinJobsError):
    """An option is unknown, not of its form or out of its range; the message names variable, value and range."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the options of a job; the fields of a subclass are checked on construction.

    Raises:
        InvalidOption: a value is out of its range.
    """

    prefix: ClassVar[str]
    """Of the variables of the environment."""
    owner: ClassVar[str]
    """Whose options they are, in words."""

    def __post_init__(self) -> None:
        rules = self.rules()
        for field in fields(self):
            allowed, is_allowed = rules[field.name]
            if not is_allowed:
                value = getattr(self, field.name)
                default = " (the default)" if value == field.default else ""
                raise InvalidOption(
                    f"{self.prefix}{field.name.upper()} is {written(value)}{default}; allowed is {allowed}"
                )

    def rules(self) -> Mapping[str, tuple[str, bool]]:
        """Per option its allowed range in words, and whether its value lies in it."""
        raise NotImplementedError

    def in_words(self) -> dict[str, str]:
        """Every option as people write it, for the UI."""
        return {field.name: written(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables that begin with the prefix; an empty one counts as not set.

        Durations are seconds (`45`), `00:00:45` or ISO 8601 (`PT45S`); a day is `2026-01-31`.

        Raises:
            InvalidOption: a variable is unknown, malformed or out of its range.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if variable.startswith(cls.prefix) and text.strip():
                name = variable.removeprefix(cls.prefix).lower()
                if name not in kinds:
                    raise InvalidOption(cls._unknown(variable, kinds))
                values[name] = _READERS[kinds[name]](variable, text.strip())
        return cls(**values)

    @classmethod
    def _unknown(cls, variable: str, known: Mapping[str, type]) -> str:
        variables = [cls.prefix + name.upper() for name in known]
        close = difflib.get_close_matches(variable, variables, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(variables)}"
        return f"{variable} is not an option of {cls.owner}; {hint}"


def written(value: object) -> str:
    """A value of an option as people write it."""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
    return str(value)


def _duration(variable: str, text: str) -> timedelta:
    if _DURATION_FORMS.fullmatch(text):
        # pydantic reads 00:00:45 and PT45S itself, but seconds only as a number.
        is_seconds = text[0].isdigit() and ":" not in text
        with suppress(ValidationError, OverflowError):
            return _DURATION.validate_python(float(text) if is_seconds else text)
    raise InvalidOption(f"{variable} is {text[:40]!r}; allowed is a duration: 45, 00:00:45 or PT45S")


def _whole_number(variable: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise InvalidOption(f"{variable} is {text[:40]!r}; allowed is a whole number")
    return int(text)


def _day(variable: str, text: str) -> date:
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        with suppress(ValueError):
            return date.fromisoformat(text)
    raise InvalidOption(f"{variable} is {text[:40]!r}; allowed is a day: 2026-01-31")


_READERS: Final[Mapping[type, Callable[[str, str], Any]]] = {timedelta: _duration, int: _whole_number, date: _day}
