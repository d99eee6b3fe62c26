"""The loop that waits for a TPU node (a.2). Asking, sleeping, the clock and chance are handed in, so it is testable."""

from __future__ import annotations

from launcher.errors import PERMANENT, LaunchError
from launcher.tpu_node import FORBIDDEN, LOST, NEVER, NOT_FOUND, READY, UNAUTHORIZED, Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from launcher.cloud import NodeClient
    from launcher.settings import Settings

# The documented loop's last words (S4); log alerts look for them.
FAILED = "Failed to schedule TPU: "
REFUSALS = 3  # 403 is permanent at the third; 401 is asked again three times after a fresh token
JITTER = 0.1  # of the interval, so that the hosts of a pod do not ask in step (pitfall 24)
LOG_EVERY = 6  # attempts with the same answer: one line a minute at 10 s


def wait_for_node(
    client: NodeClient,
    settings: Settings,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    chance: Callable[[], float],
    log: Callable[[str], None],
) -> Answer:
    """Ask until the node is ready.

    Attempts start `interval` seconds apart, each shifted by up to a tenth of it; the shifts do not add up, and the
    last attempt is never later than (attempts - 1) * interval: 390 s with the defaults. The first success does not
    sleep. A slow answer shortens the sleep after it.

    Args:
        client: asks once a call.
        settings: attempts, interval, require_healthy, retryable_exit.
        sleep: `time.sleep`, seconds.
        clock: `time.monotonic`, seconds.
        chance: uniform in [0, 1).
        log: one line for a person.

    Returns:
        the answer with READY.

    Raises:
        LaunchError: 1 when the node can never be had, `settings.retryable_exit` when another try may help.
    """
    name = client.node.name
    seen: dict[str, int] = {}
    shift = 0.0
    last = ""
    for attempt in range(1, settings.attempts + 1):
        started = clock()
        answer = client.ask()
        if answer.action == UNAUTHORIZED and UNAUTHORIZED not in seen:
            seen[UNAUTHORIZED] = 0
            log(f"{answer.reason}; asking again with a fresh token")
            answer = client.ask(fresh_token=True)
        seen[answer.action] = seen.get(answer.action, 0) + 1
        reason = answer.reason
        if answer.action == READY:
            if not settings.require_healthy or answer.health == "HEALTHY":
                return answer
            reason = f"TPU {name} is not HEALTHY yet; health: {answer.health or 'None'}"
        _give_up(answer, seen, client.path, settings)
        if answer.action == NOT_FOUND:
            reason += f" (no {client.path}: not visible yet, or a wrong name, project or zone)"
        if attempt == settings.attempts:
            break
        if reason != last or attempt % LOG_EVERY == 0:
            log(f"attempt {attempt} of {settings.attempts}: {reason}; asking again every {settings.interval:g} s")
        last = reason
        # The last attempt is not shifted.
        next_shift = chance() * JITTER * settings.interval if attempt + 1 < settings.attempts else 0.0
        pause = settings.interval + next_shift - shift - (clock() - started)
        shift = next_shift
        if pause > 0:
            sleep(pause)
    raise LaunchError(FAILED + reason, settings.retryable_exit)


def _give_up(answer: Answer, seen: dict[str, int], path: str, settings: Settings) -> None:
    """Raise LaunchError where the table of a.2 says that asking again is of no use."""
    count = seen[answer.action]
    hint = {
        NEVER: "start or recreate the node, or name another",
        FORBIDDEN: f"let this job's service account read {path} (roles/tpu.viewer)",
        UNAUTHORIZED: "check the job's service account",
    }.get(answer.action, "")
    if answer.action == LOST:
        raise LaunchError(f"{FAILED}{answer.reason}; a new job may get another", settings.retryable_exit)
    if (
        answer.action == NEVER
        or (answer.action == FORBIDDEN and count >= REFUSALS)
        or (answer.action == UNAUTHORIZED and count > REFUSALS)
    ):
        raise LaunchError(f"{FAILED}{answer.reason}; {hint}", PERMANENT)
    if answer.action == NOT_FOUND and count >= settings.not_found_attempts:
        raise LaunchError(
            f"{FAILED}{answer.reason}; {path} was not found {count} times: check name, project and zone",
            settings.retryable_exit,
        )
