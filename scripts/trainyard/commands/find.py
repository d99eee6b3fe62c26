"""``trainyard find``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context
from trainyard.common.settings import PREFIX

GROUP = "publish"


@options.command(
    "List the images at a registry that have a package.",
    "trainyard find torch --registry localhost:5000/team",
    "trainyard find 'torch<2.10' --registry localhost:5000/team",
    "trainyard find openssl==3.0.17-1~deb12u2 --registry localhost:5000/team --quiet",
)
@click.argument("package", envvar=f"{PREFIX}PACKAGE", required=False, metavar="PACKAGE[==VERSION]")
@options.registry
@options.quiet
@options.json_output
@click.pass_obj
def command(context: Context, package: str | None, registry: str | None, quiet: bool, as_json: bool) -> None:
    """List the images at a registry that have PACKAGE: a Python package, or a Debian package.

    Versions of Python packages are given as PEP 440 specifiers, such as ==2.9.1 or '<2.10'; of a Debian package, one
    version can be given, with ==. The SBOMs that 'trainyard push' attached to the images are read. Images without one
    are listed as not covered. An image of several platforms is one image per platform.

    With --quiet the references of the images, by digest, are printed on stdout. The exit status is 0 whether or not an
    image has the package.
    """
    from trainyard.common import console, errors
    from trainyard.oci.registry import Repository, check_address
    from trainyard.release import package_search
    from trainyard.spec.naming import NAME

    if not package:
        example = "trainyard find torch==2.9.1 --registry localhost:5000/team"
        raise errors.UserError(f"no package to look for: give one, as in '{example}'")
    query = package_search.Query.parse(package)
    answer = package_search.search(Repository(f"{check_address(registry)}/{NAME}", context.state), query)
    console.result(answer.as_dict(), as_json=as_json)
    if answer.matches:
        console.show(package_search.table(answer))
    for image, reason in answer.not_covered:
        console.warn(f"not covered: {image.shown}: {reason}")
    if answer.not_compared:
        console.warn(
            f"{query.name} is also a Debian package in {len(answer.not_compared)} images, which a range does not match"
        )
    console.say(f"{len(answer.digests)} of {answer.images} images at {answer.repository} have {query}")
    if quiet and not as_json:
        for digest in answer.digests:
            click.echo(f"{answer.repository}@{digest}")
