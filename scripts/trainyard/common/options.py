"""Options and arguments that commands declare.

Every option may come from a variable instead: ``--registry`` from ``TRAINYARD_REGISTRY``, which is what
``make COMMAND REGISTRY=...`` sets (:mod:`trainyard.common.settings`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trainyard.common.settings import PREFIX, standard_variable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class Count(click.IntRange):
    """A whole number in a range, which messages and ``--help`` call a number instead of an ``integer range``."""

    name = "whole number"

    def get_metavar(self, *_context: Any, **_more: Any) -> str:
        """What ``--help`` shows for the value."""
        return "NUMBER"


class Number(click.FloatRange):
    """A number in a range, under that name in messages and ``--help``."""

    name = "number"


class Folder(click.Path):
    """A folder. click takes an empty text, as of a shell's variable that is not set, for the current one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) if value else self.fail("no folder is given", param, ctx)


class _Switch(click.types.BoolParamType):
    """The value of a flag's variable. click's own message lists an empty text as the first valid value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither 1 nor 0", param, ctx)


#: Returns what the shell offers for a parameter.
Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def targets(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the targets that the shell offers, and the commands of a group; for a path, its folders."""
    from click.shell_completion import CompletionItem

    from trainyard.common import settings

    if incomplete.startswith((".", "/")):
        return [CompletionItem(incomplete, type="dir")]
    images = settings.ROOT / "images"
    versions = [f"{path.parts[-3]}-{path.parts[-2]}" for path in images.glob("*/*/version.yaml")]
    known = sorted([*(path.parent.name for path in images.glob("*/image.yaml")), *versions])
    known += context.command.inner_names(context) if isinstance(context.command, Group) else []
    return [CompletionItem(value) for value in known if value.startswith(incomplete)]


def one_of(values: Callable[[], Iterable[str]]) -> Complete:
    """Return what offers the values that a function returns within 200 ms: without slow libraries."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(value) for value in values() if value.startswith(incomplete)]

    return complete


def option(flag: str, *names: str, variable: str | None = None, **attributes: Any) -> Callable[[F], F]:
    """A :func:`click.option` with its variable, which is named after ``flag`` unless ``variable`` is given.

    ``option("--base-image", help=...)`` is also ``TRAINYARD_BASE_IMAGE``.
    """
    name = variable or flag.split("/")[0].lstrip("-").replace("-", "_").upper()
    attributes.setdefault("show_default", attributes.get("default") not in (None, "") and not attributes.get("is_flag"))
    return click.option(flag, *names, envvar=PREFIX + name, show_envvar=True, **attributes)


def flag(name: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """An option without a value; its variable counts as given when it is ``1``, ``true``, ``yes`` or ``on``."""
    return option(name, *names, is_flag=True, type=_Switch(), **attributes)


def command(summary: str, *examples: str, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Return what makes a function a command, whose docstring ``--help`` shows.

    Args:
        summary: what lists of commands show.
        examples: command lines, which ``--help`` ends with.
        attributes: of :func:`click.command`.
    """
    epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])
    return click.command(short_help=summary, epilog=epilog, **attributes)


class Group(click.Command):
    """A command with other commands below it, as in ``job`` and ``job check``; ``--help`` lists them."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of the group, then the epilog."""
        root: Any = ctx.find_root().command
        root.write_commands(ctx, formatter, root.list_group(self.name))
        super().format_epilog(ctx, formatter)

    def inner_names(self, ctx: click.Context) -> list[str]:
        """Return the names of its commands, without that of the group."""
        root: Any = ctx.find_root().command
        return [name.split()[1] for name in root.list_group(self.name)]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return options, as for any command, and the commands of the group."""
        from click.shell_completion import CompletionItem

        inner = [CompletionItem(name) for name in self.inner_names(ctx) if name.startswith(incomplete)]
        return [*inner, *super().shell_complete(ctx, incomplete)]


class Forwarding(click.Command):
    """A command that passes the words after ``--`` on to another program; its function has the parameter ``words``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what is before the first ``--``."""
        at = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:at])
        ctx.params["words"] = (*ctx.params.get("words", ()), *args[at + 1 :])
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What ``--help`` shows after the command's name."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


def words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The callback of an option whose value is split as a shell splits words."""
    import shlex

    try:
        return tuple(shlex.split(value or ""))
    except ValueError as error:
        raise click.BadParameter(f"{str(error).lower()}: {value}") from None


#: The argument TARGET: an image of the catalogue by its name, or the path of a folder with an image.yaml. In a user's
#: repository, the default is its own image.
target = click.argument("target", envvar=f"{PREFIX}TARGET", required=False, shell_complete=targets)

#: ``--json``: the result as JSON on stdout.
json_output = flag("--json", "as_json", help="Print the result as JSON on stdout.")


def _be(how: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    """Return what calls a function of the console, by its name, if a flag is given."""

    def apply(_context: click.Context, _parameter: click.Parameter, given: bool) -> bool:
        if given:
            from trainyard.common import console

            getattr(console, how)()
        return given

    return apply


#: ``--quiet``: only warnings and errors on stderr, and only the digest or reference of the result on stdout.
quiet = flag("--quiet", "-q", callback=_be("be_quiet"), help="Print nothing but warnings, errors and the digest.")

#: ``--verbose``: the tables of layers, rules and uploads, and the log of the builder.
verbose = flag(
    "--verbose",
    "-v",
    callback=_be("be_verbose"),
    expose_value=False,
    help="Print tables, steps and the whole log, too.",
)


def _choose(context: click.Context, parameter: click.Parameter, given: Any) -> None:
    """Set what an option gives in the :class:`~trainyard.common.context.Context` of its command, by its name."""
    chosen = given or (given is False and parameter.secondary_opts)  # --no-...
    if chosen and context.obj is not None:  # None where the shell completes words
        context.obj = dataclasses.replace(context.obj, **{str(parameter.name): given})


#: ``--offline``: use what 'trainyard dev fetch' has downloaded, and no network.
offline = flag(
    "--offline",
    callback=_choose,
    expose_value=False,
    help="Use no network: what 'trainyard dev fetch' has downloaded must suffice.",
)

#: ``--no-build``: see :mod:`trainyard.image.build_backends`.
no_build = flag(
    "--no-build",
    callback=_choose,
    expose_value=False,
    help="Run no build backend of a project or dependency: fail where one has to be asked.",
)

#: ``--smoke-network``: see :func:`trainyard.image.smoke_test.network_of`.
smoke_network = flag(
    "--smoke-network/--no-smoke-network",
    default=None,
    callback=_choose,
    expose_value=False,
    help="Let the command of this repository use the network in its smoke test, from now on, on this host.",
)

#: ``--builder``: what ``docker buildx`` builds on.
builder = option(
    "--builder",
    metavar="NAME",
    callback=_choose,
    expose_value=False,
    help="Builder of 'docker buildx' to build on, by default the one that buildx uses.",
)

#: ``--data``: what smoke tests have at /data.
data = option(
    "--data",
    type=Folder(exists=True, file_okay=False, resolve_path=True),
    callback=_choose,
    expose_value=False,
    help="Folder that smoke tests read at /data, also from outside of the repository. Default: 'smoke.data'.",
)

#: ``--recipe``: what an image is compared with, or tested by.
recipe = option(
    "--recipe",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The recipe of the image, which the first argument names; then no TARGET and no repository is needed.",
)

#: ``--trust-config``: the Sigstore instance that certificates are of.
trust_config = option(
    "--trust-config",
    metavar="FILE",
    callback=_choose,
    expose_value=False,
    help="Trust configuration (JSON) of another Sigstore instance than the public one.",
)

#: ``--registry``: where images are pushed to and looked up.
registry = option("--registry", metavar="HOST[:PORT]/PATH", help="Registry and path that images are kept under.")

#: ``--keyless``: sign by the identity of this machine.
keyless = flag(
    "--keyless", help="Sign by the identity of this CI job or cloud machine instead of with a key, through Sigstore."
)

#: ``--compression``: of the layers of an image that is built.
compression = option(
    "--compression",
    type=click.Choice(["zstd", "gzip"]),
    default="zstd",
    help="Compression of the layers; gzip is for registries and engines without zstd.",
)


def key(flag: str, variable: str, help_text: str) -> Callable[[F], F]:
    """An option for a key's file, by default the one that ``variable``, which cosign reads too, names."""

    def default() -> str | None:
        return standard_variable(variable) or None

    kind = click.Path(path_type=Path)
    return option(flag, variable=variable, type=kind, default=default, show_default=variable, help=help_text)


def signing(function: F) -> F:
    """Add ``--key`` and ``--keyless``: who signs images."""
    private_key = key("--key", "COSIGN_KEY", "Private key (PEM) to sign with. COSIGN_PASSWORD decrypts it.")
    return private_key(keyless(trust_config(function)))


def checking(function: F) -> F:
    """``--public-key``, or ``--certificate-identity`` and ``--certificate-oidc-issuer``: whose signatures count.

    The last two are called as in cosign.
    """
    public_key = key("--public-key", "COSIGN_PUB", "Public key (PEM) to check signatures and claims with.")
    identity = option(
        "--certificate-identity",
        metavar="NAME",
        help="Identity whose claims count, instead of a public key's: a workflow's URL, or an address.",
    )
    issuer = option("--certificate-oidc-issuer", metavar="URL", help="Issuer of the identity; required with it.")
    return public_key(identity(issuer(function)))
