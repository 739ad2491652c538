"""Moments in messages."""

from datetime import UTC, datetime


def moment(value: datetime) -> str:
    """A moment as people read it: UTC, milliseconds."""
    return value.astimezone(UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
