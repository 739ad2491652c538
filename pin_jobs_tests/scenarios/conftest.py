"""What the scenarios share."""

from collections.abc import Callable

import pytest


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Notes figures down, on one line of the output and as properties of the report."""

    def note(what: str, **figures: float) -> None:
        for name, value in figures.items():
            record_property(name, value)
        line = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        print(f"\n{what}: {line}")  # noqa: T201  # figures are for people

    return note
