"""What the web server of the sandbox says about itself, the code location and the daemon."""

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any, Final

from pin_jobs.sandbox.errors import SandboxError

_QUESTION: Final = """{
  workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError {
    __typename ... on PythonError { message className causes { message } } } } } }
  instance { daemonHealth { allDaemonStatuses { daemonType required healthy lastHeartbeatTime } } }
}"""


@dataclass(frozen=True)
class WebState:
    """Whether the code location is loaded, why it cannot be, and which required daemons do not run yet."""

    loaded: bool
    load_error: str | None
    missing_daemons: tuple[str, ...]


def web_state(port: int, since: float) -> WebState | None:
    """Ask the web server on that port of 127.0.0.1; `None` while it does not answer.

    `since`, in seconds of the epoch: heartbeats before that are another daemon's, of the last start.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/graphql", json.dumps({"query": _QUESTION}), {"Content-Type": "application/json"})
        data = json.load(connection.getresponse())["data"]
        locations = [entry["locationOrLoadError"] for entry in data["workspaceOrError"]["locationEntries"]]
        daemons = data["instance"]["daemonHealth"]["allDaemonStatuses"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()
    errors = [_reason(location) for location in locations if location and location["__typename"] == "PythonError"]
    return WebState(
        loaded=bool(locations) and all(location and "message" not in location for location in locations),
        load_error=next((error for error in errors if error), None),
        missing_daemons=tuple(
            each["daemonType"]
            for each in daemons
            if each["required"] and not (each["healthy"] and (each["lastHeartbeatTime"] or 0) >= since)
        ),
    )


def _reason(error: dict[str, Any]) -> str | None:
    # The code server may still be starting; the web server looks again by itself.
    if error["className"] == "DagsterUserCodeUnreachableError":
        return None
    innermost = [error["message"], *(cause["message"] for cause in error["causes"])][-1]
    return next((line.strip() for line in reversed(innermost.splitlines()) if line.strip()), "no reason given")


def free_port(wanted: int) -> int:
    """The wanted port of 127.0.0.1, or the next one that nobody listens on.

    Raises:
        SandboxError: a hundred in a row are taken.
    """
    for port in range(wanted, min(wanted + 100, 65536)):
        if not _is_taken(port):
            return port
    raise SandboxError(f"the ports from {wanted} on are all taken; name another with --port")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As the web server binds it: connections of the last start that still linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            raise SandboxError(f"port {port} needs root; name another with --port") from None
        except OSError:
            return True
    # macOS lets one bind 127.0.0.1 over somebody who listens on all addresses.
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
