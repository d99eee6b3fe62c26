"""A case of the corpora, and the judgement of Trainyard about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainyard.common.errors import UserError
from trainyard_jobs.check import placeholders
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file

Document = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A file, and what upstream says of it.

    Attributes:
        name: unique in its corpus.
        source: the link to upstream's example, test or schema.
        text: the file, YAML.
        valid: whether upstream accepts it, and its job can start.
    """

    name: str
    source: str
    text: str
    valid: bool

    def refusals(self) -> list[str]:
        """Why Trainyard says that the file is refused, or that its job cannot start; none if it accepts it."""
        try:
            job = job_file.parse(self.text, Path("job.yaml"))
            placeholders.refuse(placeholders.in_job(job), "job.yaml")
            evidence = Evidence(job)
            return [f"{one.rule}: {one}" for one in all_rules.check(evidence) if one.fails]
        except UserError as error:
            return [str(error)]


class _Dumper(yaml.CSafeDumper):
    """Without anchors: equal parts are written again."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dumped(*documents: Document) -> str:
    """Documents as the text of a YAML file."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False))


def cases(prefix: str, source: str, entries: Iterable[tuple[str, Document, bool]]) -> Iterator[Case]:
    """Cases of one source, from (name, document, whether it is valid)."""
    for name, document, valid in entries:
        yield Case(f"{prefix}: {name}", source, dumped(document), valid)
