"""Verify that an image is its recipe, and breaks no rule. That takes seconds, and no accelerator."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from trainyard.common import rule_engine, stages
from trainyard.common.context import Context
from trainyard.common.docker_engine import OWNER, owner_name
from trainyard.common.errors import StepFailed
from trainyard.common.rule_engine import Finding
from trainyard.lint import waivers
from trainyard.lint.image import contents, core, filesystem
from trainyard.lint.image.evidence import Evidence, expected
from trainyard.oci import layers, probe_runner
from trainyard.oci.layers import Stored
from trainyard.recipe import Recipe
from trainyard.sandbox.containers import remove_labelled
from trainyard.spec import naming, state
from trainyard.spec.units import in_units

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger(__name__)

#: The metadata of an installed package: the name is before the version.
_METADATA = re.compile(r"/([^/]+)-[^-/]+\.dist-info/METADATA$")


class VerifyFailed(StepFailed):
    """Report that an image breaks a rule; ``facts`` is the result of :func:`verify`."""

    def __init__(self, message: str, facts: dict[str, Any]) -> None:
        super().__init__(message)
        self.facts = facts


def gather(recipe: Recipe | None, reference: str, context: Context) -> Evidence:
    """Return what the rules look at. The probe runs in a container while the layers are read here.

    Raises:
        UserError: there is no such image.
        StepFailed: the image cannot be read or run.
    """
    engine = context.engine
    image = engine.image(reference, made_by=_made_by(recipe))
    wanted = expected(recipe, str(image.id), context.state) if recipe else None
    known = recipe.layers if recipe else ()
    with ThreadPoolExecutor(max_workers=1) as background:
        seen = background.submit(probe_runner.probe, engine, reference, *probe_runner.PARTS)
        # What has a known digest holds what is known of it: nothing else is read byte by byte.
        unknown = (lambda diff_id: diff_id not in wanted.layers) if wanted else (lambda _: False)
        try:
            stored = layers.read(engine, reference, known, hashed=unknown, state=context.state)
            inside = seen.result()
        except (probe_runner.NoPython, probe_runner.ProbeFailed) as error:
            # What made it fail is among the files, which are checked all the same.
            logger.warning(f"{error}; only its layers and its configuration are checked")
            failed = recipe is not None or isinstance(error, probe_runner.ProbeFailed)
            inside = dataclasses.replace(probe_runner.NOTHING, error=str(error) if failed else "")
        except BaseException:  # Ctrl-C: the other thread waits for its container
            remove_labelled(engine, f"{OWNER}={owner_name(os.getpid())}")
            raise
        return Evidence(
            recipe=recipe,
            reference=reference,
            tags=tuple(image.tags),
            stored=stored if recipe else layers.without_base(stored),
            inside=inside,
            expected=wanted,
            waivers=waivers.load(),
        )


def _made_by(recipe: Recipe | None) -> str:
    """Return the command that makes an image, for messages."""
    return recipe.command("dev build") if recipe else "docker pull"


def examine(recipe: Recipe | None, reference: str, context: Context) -> tuple[Evidence, dict[str, list[Finding]]]:
    """Return the evidence about an image, and the findings by rule. Nothing is recorded."""
    evidence = gather(recipe, reference, context)
    return evidence, core.check(evidence)


def described(stored: Stored) -> dict[str, Any]:
    """Return what the record says of an image's blobs: ``layers``, ``config``, ``manifest``; see :func:`verify`."""
    parts = [
        {
            "stage": layer.stage,
            "created_by": layer.created_by.splitlines()[0] if layer.created_by else "",
            "digest": layer.digest,
            "diff_id": layer.diff_id,
            "size": layer.contents.size,
            "compressed": layer.stored,
        }
        for layer in stored.layers
    ]
    config = {"digest": stored.config_digest, "size": stored.config_size}
    return {"layers": parts, "config": config, "manifest": {"size": stored.manifest_size}}


def unseen(part: object) -> None:
    """Show nothing: the ``show`` of :func:`verify` for callers that read its result alone."""


def verify(
    recipe: Recipe | None, reference: str, context: Context, *, show: Callable[[object], None] = unseen
) -> dict[str, Any]:
    """Verify an image, and record the result for its digest.

    Args:
        recipe: what the image must be; with None only the rules that need none apply, and nothing is recorded.
        reference: the image.
        show: called with what people read: each :class:`Finding`, and with ``--verbose`` a table of the layers.
    Returns:
        ``digest``, ``passed``, ``findings`` and ``notes`` (each a :class:`Finding` as dictionary), ``size`` (bytes),
        ``layers`` (``stage``, ``created_by``, ``digest``, ``diff_id``, ``size``, ``compressed``), ``config``
        (``digest``, ``size``), ``manifest`` (``size``), ``packages`` (their number), ``rules`` (ids of those that
        apply), ``seconds``.
    Raises:
        UserError: there is no such image.
        VerifyFailed: it breaks a rule; the message gives the first finding and the number of the others.
    """
    started = time.monotonic()
    digest = context.engine.digest(reference, made_by=_made_by(recipe))
    kept = recipe.kept(context.state) if recipe else None
    with stages.stage("verify", state.seconds(kept, "verify") if kept else None) as stage:
        stages.now("reading the layers")
        evidence, by_rule = examine(recipe, reference, context)
        findings = [finding for some in by_rule.values() for finding in some]
        failed = [finding for finding in findings if finding.fails]
        rules = core.rules_for(evidence)
        seconds = round(time.monotonic() - started, 1)
        stage.done = f"{len(rules)} rules, {len(evidence.inside.packages)} packages"
    facts = {
        "passed": not failed,
        "findings": [rule_engine.as_dict(finding) for finding in failed],
        "notes": [rule_engine.as_dict(finding) for finding in findings if not finding.fails],
        "size": evidence.size,
        **described(evidence.stored),
        "packages": len(evidence.inside.packages),
        "rules": [rule.id for rule in rules],
        "seconds": seconds,
    }
    # An image of another target is not one that this target could publish.
    if recipe and kept and evidence.labels.get(f"{naming.LABELS}.target") == recipe.name:
        state.record(kept, "verify", digest, facts)
    if logger.isEnabledFor(logging.DEBUG):
        show(_sizes(evidence))
        if recipe:
            show(contents.compared(evidence))
    for finding in findings:
        show(finding)
    if failed:
        more = f" (and {len(failed) - 1} more findings)" if len(failed) > 1 else ""
        verdict = "does not match its recipe" if recipe else "breaks a rule for every image"
        raise VerifyFailed(f"{reference} {verdict}: {failed[0]}{more}", {"digest": digest} | facts)
    return {"digest": digest} | facts


def _sizes(evidence: Evidence) -> Table:
    """Return the layers with their sizes and largest packages, for people."""
    from rich.table import Column, Table

    sizes = (Column(name, justify="right") for name in ("size", "compressed"))
    title = f"{evidence.reference}: {in_units(evidence.size)} in layers"
    table = Table("layer", *sizes, "largest packages", title=title, title_justify="left")
    for layer in evidence.stored.layers:
        names = {canonicalize_name(match[1]) for path in layer.contents.files if (match := _METADATA.search(path))}
        packages = evidence.inside.packages if layer.ours else ()
        within = [package for package in packages if canonicalize_name(package.name) in names]
        largest = [f"{package.name} {in_units(package.bytes)}" for package in filesystem.heaviest(within, 3)]
        table.add_row(layer.stage, in_units(layer.contents.size), in_units(layer.stored), ", ".join(largest))
    return table
