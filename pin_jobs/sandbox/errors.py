"""What goes wrong in the sandbox."""

from pin_jobs.errors import PinJobsError


class SandboxError(PinJobsError):
    """The sandbox cannot do what it was asked; the message is one line that says why and where to look."""
