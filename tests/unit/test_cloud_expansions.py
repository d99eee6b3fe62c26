"""Substitutions of Cloud Build: references, and bash's parameter expansions, compared with bash itself."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from cloudbuild_local import substitutions
from trainyard.common.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$_A-${_A}_", "1-1_"),
        ("$$_A $$$_A", "$_A $1"),
        ("${PROJECT_ID}:$BUILD_ID", "p:b"),
        ("[$SHORT_SHA]", "[]"),
        ("$lower and 5$", "$lower and 5$"),
        ("${_A:-x} ${HOME%/} ${_A", "${_A:-x} ${HOME%/} ${_A"),
    ],
)
def test_references_are_replaced_by_their_values(text: str, expected: str) -> None:
    assert substitutions.substitute(text, {"_A": "1", "PROJECT_ID": "p", "BUILD_ID": "b"}) == expected


def test_dynamic_substitutions_refer_to_each_other() -> None:
    given = {"_A": "${_B}/x", "_B": "$PROJECT_ID"}
    assert substitutions.resolve(given, {"PROJECT_ID": "p"}, dynamic=True)["_A"] == "p/x"
    assert substitutions.resolve(given, {"PROJECT_ID": "p"}, dynamic=False)["_A"] == "${_B}/x"
    with pytest.raises(UserError, match="in a cycle: _A -> _B -> _A"):
        substitutions.resolve({"_A": "$_B", "_B": "${_A:-x}"}, {}, dynamic=True)


def test_dynamic_substitutions_have_parameter_expansions() -> None:
    """The example of https://cloud.google.com/build/docs/configuring-builds/use-bash-and-bindings-in-substitutions:
    a branch's name as a tag."""
    given = {"_TAG": "${BRANCH_NAME//\\//-}", "_SHORT": "${COMMIT_SHA:0:7}", "_LOUD": "${_TAG^^}"}
    built_in = {"BRANCH_NAME": "feature/a/b", "COMMIT_SHA": "0123456789abcdef"}
    found = substitutions.resolve(given, built_in, dynamic=True)
    assert (found["_TAG"], found["_SHORT"], found["_LOUD"]) == ("feature-a-b", "0123456", "FEATURE-A-B")


def test_a_required_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(UserError, match="substitution _A: set it"):
        substitutions.substitute("${_A:?set it}", {}, dynamic=True)


def test_an_expansion_of_another_variable_is_left_for_the_shell() -> None:
    text = "${HOME:-/root} ${lower%x} ${_A[0]} ${_A@Q} ${HOME:-$_A}"
    assert (
        substitutions.substitute(text, {"_A": "1"}, dynamic=True)
        == "${HOME:-/root} ${lower%x} ${_A[0]} ${_A@Q} ${HOME:-1}"
    )


VALUES = {"_A": "feature/a-b.C_d", "_B": "x.tar.gz", "_EMPTY": "", "_STAR": "a*b?c[d]"}


def bash(texts: list[str]) -> list[str]:
    """What bash makes of texts in which NAME is not split into words, one each."""
    lines = [f"{name}='{value}'" for name, value in VALUES.items()]
    lines += [f"printf '%s\\0' {text}" for text in texts]
    command = ["bash", "--norc", "-c", "set -f; IFS=; LC_ALL=C.UTF-8\n" + "\n".join(lines)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return found.stdout.split("\0")[:-1]


EXPANSIONS = [
    "${_A:-d}", "${_EMPTY:-d}", "${_EMPTY-d}", "${_UNSET:-d}", "${_UNSET-d}", "${_A:+d}", "${_EMPTY:+d}", "${_EMPTY+d}",
    "${_NEW:=d}", "${_A#*/}", "${_A##*/}", "${_A#f?a}", "${_A%.*}", "${_B%.*}", "${_B%%.*}", "${_B#*.}", "${_B##*.}",
    "${_A/a/X}", "${_A//a/X}", "${_A//[a-c]/X}", "${_A//[!a-c]/X}", "${_A//[^a-c]/X}", "${_A//a}", "${_A/#f/X}",
    "${_A/%d/X}", "${_A/#x/X}", "${_A//\\//-}", "${_A//'/'/-}", "${_A/\\./\\/}", "${_A:0:7}", "${_A:3}", "${_A: -3}",
    "${_A: -3:2}", "${_A:2:-2}", "${_A:100}", "${_A:0:0}", "${_A^^}", "${_A^}", "${_A,,}", "${_B^^[a-m]}", "${_A,,C}",
    "${#_A}", "${#_EMPTY}", "${_STAR//\\*/X}", "${_STAR//\\?/X}", "${_STAR//'*'/X}", "${_STAR#a\\*}", "${_STAR//\\[/X}",
    "${_UNSET:-${_B%.gz}}", "${_A/feature/${_B}}", "${_UNSET:-'a b'}", "${_EMPTY//a/b}", "${_A/*/X}", "${_A//*\\//X}",
    "${_UNSET:-a\\}b}", "${_A/a*/X}", "${_A/[/X}", "${_UNSET:-\"$_B\"}", "$_B${_A}", "${_B/.*.//}", "${_A#$_B}",
    "${_B%${_B#x}}",
]  # fmt: skip


def test_expansions_have_the_meaning_that_bash_gives_them() -> None:
    ours = [substitutions.substitute(text, VALUES, dynamic=True) for text in EXPANSIONS]
    assert dict(zip(EXPANSIONS, ours, strict=True)) == dict(zip(EXPANSIONS, bash(EXPANSIONS), strict=True))


PATTERNS = st.lists(st.sampled_from(["a", "b", "/", ".", "*", "?", "[a-c]", "[!a]", "\\*", "'x'", "_"]), max_size=4)


@st.composite
def expansions(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from([*VALUES, "_UNSET"]))
    kind = draw(
        st.sampled_from(["#", "##", "%", "%%", "/", "//", "/#", "/%", "^", "^^", ",", ",,", ":-", "-", ":+", "+", ":"])
    )
    pattern = "".join(draw(PATTERNS)).replace("/", "\\/")
    if kind == ":":
        # A length that ends before the offset is an error in bash.
        return f"${{{name}:{draw(st.integers(0, 9))}:{draw(st.integers(0, 9))}}}"
    if kind.startswith("/"):
        return (
            f"${{{name}{kind}{pattern}/{draw(st.sampled_from(['', 'X', 'a-b', '$_B']))}}}"
            if pattern
            else f"${{{name}}}"
        )
    return f"${{{name}{kind}{pattern}}}"


@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(expansions(), min_size=1, max_size=25, unique=True))
def test_generated_expansions_have_the_meaning_that_bash_gives_them(texts: list[str]) -> None:
    ours = [substitutions.substitute(text, VALUES, dynamic=True) for text in texts]
    assert dict(zip(texts, ours, strict=True)) == dict(zip(texts, bash(texts), strict=True))


@settings(max_examples=examples(200))
@given(text=st.text(alphabet="${}_AB:-#%/^,*?[]\\'\"1 ", max_size=30))
def test_any_text_is_expanded_or_left_unchanged(text: str) -> None:
    try:
        assert isinstance(substitutions.substitute(text, VALUES, dynamic=True), str)
    except UserError as error:
        assert str(error).startswith("substitution _")
