"""The loop that waits for a TPU node (R12). Client, sleep, clock and random numbers are arguments, for tests."""

from __future__ import annotations

from launcher.errors import PERMANENT, LaunchError
from launcher.tpu_node.node import FORBIDDEN, LOST, NOT_FOUND, READY, UNAUTHORIZED, UNUSABLE, Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from launcher.runtime import Decision, Facts
    from launcher.settings import Settings
    from launcher.tpu_node.cloud import NodeClient

# The message of the loop that Google documented; log alerts match it (R12.1).
FAILED = "Failed to schedule TPU: "
MAX_DENIALS = 3  # 403 is permanent at the third attempt; 401 is retried three times after a new token
JITTER = 0.1  # of the interval, so that the hosts of a slice do not send their requests at the same moment (R12.2)
LOG_EVERY = 6  # attempts with the same reason: one line per minute at 10 s


def run(
    facts: Facts, decision: Decision, log: Callable[[str], None], report_signal: Callable[[str, int], object]
) -> Answer:
    """Wait for the TPU node of a decision (R12).

    Args:
        facts: environment, machine, image and settings.
        decision: the runtime, with the node; gets warnings.
        log: writes one line.
        report_signal: called with a message and the exit status if a signal ends the wait.

    Raises:
        LaunchError: see `wait_for_node`.
    """
    import os
    import time

    from launcher.metadata import Metadata
    from launcher.process import ExitOnSignal
    from launcher.tpu_node import cloud

    settings, node = facts.settings, decision.node
    assert node is not None
    metadata = Metadata(settings.metadata_host)
    tokens = cloud.Tokens(metadata, lambda: cloud.google_auth_token(facts.image, facts.env))
    client = cloud.NodeClient(node, settings, metadata, tokens)
    with ExitOnSignal(report_signal):  # random numbers without the 5 ms that importing `random` takes
        random = lambda: int.from_bytes(os.urandom(4), "big") / 2**32  # noqa: E731
        answer = wait_for_node(client, settings, time.sleep, time.monotonic, random, log)
    decision.warnings.extend(client.warnings)
    if answer.health not in ("", "HEALTHY", "HEALTH_UNSPECIFIED"):
        decision.warnings.append(f"TPU {node.name!r} is READY, but its health is {answer.health}")
    return answer


def wait_for_node(
    client: NodeClient,
    settings: Settings,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    random: Callable[[], float],
    log: Callable[[str], None],
) -> Answer:
    """Send requests until the node is ready.

    Attempts start `interval` seconds apart, each delayed by up to a tenth of it. The delays do not add up, and the last
    attempt starts (attempts - 1) * interval seconds after the first: 390 s with the defaults. The time that a request
    takes is subtracted from the sleep after it. There is no sleep after a success.

    Args:
        client: sends one request per call.
        settings: attempts, interval, require_healthy, retryable_exit.
        sleep: `time.sleep`, in seconds.
        clock: `time.monotonic`, in seconds.
        random: a uniform random number in [0, 1).
        log: writes one line.

    Returns:
        the answer with READY.

    Raises:
        LaunchError: (1) if the node cannot be used, (`settings.retryable_exit`) if a retry may help.
    """
    name = client.node.name
    seen: dict[str, int] = {}
    delay = 0.0
    last = ""
    for attempt in range(1, settings.attempts + 1):
        started = clock()
        answer = client.ask()
        if answer.action == UNAUTHORIZED and UNAUTHORIZED not in seen:
            seen[UNAUTHORIZED] = 0
            log(f"{answer.reason}; retrying with a new token")
            answer = client.ask(fresh_token=True)
        seen[answer.action] = seen.get(answer.action, 0) + 1
        reason = answer.reason
        if answer.action == READY:
            if not settings.require_healthy or answer.health == "HEALTHY":
                return answer
            reason = f"TPU {name} is not HEALTHY yet; health: {answer.health or 'None'}"
        _give_up(answer, seen, client.path, settings)
        if answer.action == NOT_FOUND:
            reason += f" ({client.path} is not visible yet, or name, project or zone are wrong)"
        if attempt == settings.attempts:
            break
        if reason != last or attempt % LOG_EVERY == 0:
            log(f"attempt {attempt} of {settings.attempts}: {reason}; retrying every {settings.interval:g} s")
        last = reason
        # The last attempt is not delayed.
        next_delay = random() * JITTER * settings.interval if attempt + 1 < settings.attempts else 0.0
        pause = settings.interval + next_delay - delay - (clock() - started)
        delay = next_delay
        if pause > 0:
            sleep(pause)
    raise LaunchError(FAILED + reason, settings.retryable_exit)


def _give_up(answer: Answer, seen: dict[str, int], path: str, settings: Settings) -> None:
    """Raise LaunchError if a retry does not help (R12.1)."""
    count = seen[answer.action]
    hint = {
        UNUSABLE: "start or recreate the node, or use another",
        FORBIDDEN: f"grant this job's service account read access to {path} (roles/tpu.viewer)",
        UNAUTHORIZED: "check the job's service account",
    }.get(answer.action, "")
    if answer.action == LOST:
        raise LaunchError(f"{FAILED}{answer.reason}; a new job may get another node", settings.retryable_exit)
    if (
        answer.action == UNUSABLE
        or (answer.action == FORBIDDEN and count >= MAX_DENIALS)
        or (answer.action == UNAUTHORIZED and count > MAX_DENIALS)
    ):
        raise LaunchError(f"{FAILED}{answer.reason}; {hint}", PERMANENT)
    if answer.action == NOT_FOUND and count >= settings.not_found_attempts:
        raise LaunchError(
            f"{FAILED}{answer.reason}; {path} was not found {count} times: check name, project and zone",
            settings.retryable_exit,
        )
