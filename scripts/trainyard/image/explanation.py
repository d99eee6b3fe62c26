"""Say why uv found no solution, in a line that begins with the user's requirement that it is about.

It is for people alone: nothing is decided by what uv writes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainyard.common.errors import UserError
from trainyard.image.resolution import Request, Unfit
from trainyard.image.resolver import NAME, Failed, NoSolution
from trainyard.workspace.lines import Line

logger = logging.getLogger(__name__)

#: Letters of a reason up to which all its steps are shown.
_LONG = 700


@contextmanager
def explained(request: Request, lines: Sequence[Line]) -> Iterator[None]:
    """Say in one line why uv found no solution, with the user's line that it is about.

    Args:
        request: what is resolved.
        lines: the user's that are resolved.
    """
    spec = request.spec
    try:
        yield
    except Unfit as error:
        about = [line for line in lines if line.name == error.name]
        subject = f"{about[0].where}: {about[0].shown}" if about else f"{spec.where}: the requirements"
        raise UserError(f"{subject} cannot be installed: {error.reason}") from None
    except Failed as error:
        text = re.sub(
            r"hint: While the active Python version.*?`requires-python`\.", "", " ".join(error.stderr.split())
        )
        text = re.sub(r"{[^}]*}", "", text).strip()  # markers of requirements
        here = " or ".join(one.platform for one in request.platforms)
        text = re.sub(
            r"`[^`]*python_full_version[^`]*`-compatible wheels",
            f"wheels for {here} and Python {spec.python_version}",
            text,
        )
        text = text.replace(f"{NAME} depends on", "this image needs").replace(f"{NAME}'s", "its")
        match = re.search(
            r"No solution found when resolving dependencies(?: for split \(markers: .*?\))?:?(?: cause:| ╰─▶) ?(.*)",
            text,
        )
        if not match:
            raise Failed(spec.target, text, unsatisfiable=error.unsatisfiable) from None
        reason = match[1][:1].lower() + match[1][1:]
        about = [line for line in lines if re.search(rf"(?<![\w-]){re.escape(line.name)}(?![\w-])", reason)]
        subject = f"{about[0].where}: {about[0].shown}" if about else f"{spec.where}: the requirements"
        logger.debug(reason)
        first, *steps = reason.split(" And because ")
        shortened = [first, "...", steps[-1]] if len(reason) > _LONG and len(steps) > 1 else [first, *steps]
        if gone := re.search(r"([^\s`]+)==(\S+) was yanked(?: \(reason: (.*?)\))?", first):
            why = f", '{gone[3]}'" if gone[3] else ""
            shortened = [f"{gone[1]} {gone[2]} was withdrawn (yanked{why}): require another version"]
        reason = " And because ".join(shortened).replace("And because ... ", "... ")
        raise NoSolution(f"{subject} cannot be installed: {reason}") from None
