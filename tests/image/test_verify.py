"""Rules for images, on real images: an image that passed has no finding, and faults planted in a copy are found."""

from __future__ import annotations

import base64
import dataclasses
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import plans
from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.rule_engine import Finding
from trainyard.common.settings import state_folder
from trainyard.image import recipes
from trainyard.lint.image import core, verify
from trainyard.lint.image.evidence import Evidence
from trainyard.oci import image_store, layers, probe_runner
from trainyard.spec import architectures, state
from trainyard.spec.model import load

pytestmark = pytest.mark.concurrent

Findings = dict[str, list[Finding]]

KEY = "-----BEGIN PRIVATE KEY-----\\n" + "QUJD" * 32 + "\\n-----END PRIVATE KEY-----\\n"
AUTHORITY = f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(bytes(range(48))).decode()}\n-----END CERTIFICATE-----\n"

SITE = f"/{load('tf-cpu').site.packages}"

#: One layer a fault, on top of the image that passed. {token} is put in by the test: no file here holds one.
PLANTED = r"""
FROM {image}
USER root
RUN sed -i 's/^Version: .*/Version: 0.0.1/' {site}/fsspec-*.dist-info/METADATA
RUN cd {site} && mkdir sneaked-1.0.dist-info \
 && printf 'Metadata-Version: 2.1\nName: sneaked\nVersion: 1.0\n' >sneaked-1.0.dist-info/METADATA
RUN rm -r {site}/cloudml_hypertune-*.dist-info
RUN sed -i "s/'is_cuda_build', False/'is_cuda_build', True/" \
  {site}/tensorflow/python/platform/build_info.py
COPY netrc /home/trainer/.netrc
RUN rm /home/trainer/.netrc
COPY account.json /opt/trainyard/account.json
COPY corporate.crt /usr/local/share/ca-certificates/corporate.crt
RUN cat /usr/local/share/ca-certificates/corporate.crt >>/etc/ssl/certs/ca-certificates.crt
RUN cp /usr/bin/env /usr/local/bin/run-as-root && chmod 4755 /usr/local/bin/run-as-root
RUN printf 'x = 1\n' >/opt/trainyard/trainers/fresh.py
RUN printf '# changed\n' >>/opt/trainyard/trainers/common/order.py
RUN sed -i 's/"summary": "TensorFlow for CPUs"/"summary": "TensorFlow"/' /opt/trainyard/recipe.json
RUN ACCESS_TOKEN={token} true
ENV HF_TOKEN=x REQUESTS_CA_BUNDLE=/opt/corporate.pem
LABEL io.trainyard.framework=tensorflow==2.20.0
ENTRYPOINT ["launch"]
"""

#: These find most faults once more: every file that no build has, and every setting that no spec has.
WHATEVER_IS_PLANTED = {
    "files_are_those_of_the_build",
    "files_are_those_of_their_wheels",
    "nothing_else_is_configured",
    "requirements_are_met",
}

EXPECTED = [
    ("installed_matches_locks", "package fsspec: is 0.0.1; the lock has 20"),
    ("installed_matches_locks", f"package sneaked 1.0 in {SITE}: is in no lock"),
    ("installed_matches_locks", "package cloudml-hypertune: is not installed"),
    ("tensorflow_has_its_cudnn", "is a CUDA build under the name tensorflow-cpu"),
    ("no_credentials_in_layers", "/home/trainer/.netrc in layer added: holds netrc credentials"),
    ("no_credentials_in_layers", "/opt/trainyard/account.json in layer added: holds a private key"),
    ("no_credentials_in_settings", "ENV HF_TOKEN: holds a secret by its name"),
    ("no_credentials_in_settings", "(RUN): holds a secret by its name (ACCESS_TOKEN)"),
    ("no_credentials_in_settings", "(ENV): holds a secret by its name (HF_TOKEN)"),
    ("no_foreign_certificates", "/usr/local/share/ca-certificates/corporate.crt in layer added: holds 1 certificates"),
    ("no_foreign_certificates", "/etc/ssl/certs/ca-certificates.crt in layer added: holds 1 certificates"),
    ("no_foreign_certificates", "ENV REQUESTS_CA_BUNDLE"),
    ("no_empty_or_duplicate_layer", "layer added: is empty (RUN)"),
    ("no_setuid_beyond_the_base", "/usr/local/bin/run-as-root in layer added: has mode 4755"),
    ("no_path_stored_twice", "/opt/trainyard/trainers/common/order.py: is stored by layer common and again by added"),
    ("no_path_stored_twice", "/home/trainer/.netrc: is stored by layer added and deleted by added"),
    ("imports_do_not_compile", "/tensorflow/python/platform/build_info.py: has the byte code of another source"),
    ("imports_do_not_compile", "/opt/trainyard/trainers/fresh.py: has no byte code"),
    ("imports_do_not_compile", "/opt/trainyard/trainers/common/order.py: has the byte code of another source"),
    ("image_is_its_recipe", '/opt/trainyard/recipe.json: summary is "TensorFlow"; the recipe gives "TensorFlow for'),
    ("image_is_its_recipe", "label org.opencontainers.image.version: 'tf-cpu-2.21.0-"),
    ("image_is_its_recipe", "label io.trainyard.recipe: '"),
    ("image_is_its_recipe", "ENTRYPOINT: ['launch']; expected ['tini', '--', 'launch']"),
    ("image_is_its_recipe", "USER: 'root'"),
    (
        "image_is_its_recipe",
        "label io.trainyard.framework: 'tensorflow==2.20.0'; the recipe gives 'tensorflow==2.21.0'",
    ),
]


@pytest.fixture(scope="module")
def faultless(built_image: Callable[[str], str]) -> tuple[Evidence, Findings]:
    return plans.examined(load("tf-cpu"), built_image("tf-cpu"))


@pytest.fixture(scope="module")
def planted_image(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with every fault of PLANTED."""
    folder = tmp_path_factory.mktemp("planted")
    text = (
        PLANTED.replace("{image}", built_image("tf-cpu"))
        .replace("{site}", SITE)
        .replace("{token}", secrets.token_hex(16))
    )
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    (folder / "netrc").write_text("machine index.example login me password x\n", encoding="utf-8")
    (folder / "account.json").write_text(f'{{"type": "service_account", "private_key": "{KEY}"}}', encoding="utf-8")
    (folder / "corporate.crt").write_text(AUTHORITY, encoding="utf-8")
    reference = f"trainyard-test:planted-{secrets.token_hex(4)}"
    ENGINE.buildx("build", "--quiet", "--load", "--provenance=false", f"--tag={reference}", str(folder))
    yield reference
    ENGINE.client.images.remove(reference, force=True)


@pytest.fixture(scope="module")
def planted(planted_image: str) -> Findings:
    return plans.examined(load("tf-cpu"), planted_image)[1]


def test_an_image_that_passed_has_no_finding(faultless: tuple[Evidence, Findings]) -> None:
    evidence, found = faultless
    assert [str(one) for some in found.values() for one in some] == []
    assert len(evidence.inside.packages) == len(evidence.required_recipe.versions) > 50


def test_layers_are_named_and_measured(faultless: tuple[Evidence, Findings]) -> None:
    evidence, _ = faultless
    copied = [layer.stage for layer in evidence.stored.layers if layer.kind == "copied"]
    wheels = [stage for stage in copied if stage.startswith("wheel")]
    assert copied == [*wheels, "site", "about", "common", "trainers", "launcher"]
    assert wheels[0] == "wheel-tensorflow-cpu" and wheels[-1] == "wheels-4"
    sizes = {layer.stage: layer.contents.size for layer in evidence.stored.layers}
    assert sizes["wheel-tensorflow-cpu"] > 10**9 > 10**6 > sizes["trainers"] > 10**4
    total = sum(layer.contents.size for layer in evidence.stored.layers)
    assert evidence.size == total < evidence.required_recipe.budget.size
    assert all(
        0 < layer.stored <= layer.contents.size + 2000 for layer in evidence.stored.layers if layer.contents.size
    )


@pytest.mark.parametrize(
    ("rule", "words"), EXPECTED, ids=[f"{rule}-{number}" for number, (rule, _) in enumerate(EXPECTED)]
)
def test_a_planted_fault_is_found_and_named(planted: Findings, rule: str, words: str) -> None:
    assert any(words in str(one) for one in planted[rule]), [str(one) for one in planted[rule]]


def test_nothing_but_the_planted_faults_is_found(planted: Findings) -> None:
    """Every finding is of a planted rule; paths stored twice are those that the faults above store again."""
    assert {rule for rule, some in planted.items() if some} == {rule for rule, _ in EXPECTED} | WHATEVER_IS_PLANTED
    for rule in {rule for rule, _ in EXPECTED} - {"no_path_stored_twice"}:
        reported = [str(one) for one in planted[rule]]
        assert len(reported) == sum(one == rule for one, _ in EXPECTED), reported
    files = {one.where for one in planted["files_are_those_of_the_build"]}
    assert files >= {
        "/opt/trainyard/account.json in layer added",
        "/opt/trainyard/trainers/fresh.py in layer added",
        "/usr/local/bin/run-as-root in layer added",
    }
    assert {one.where for one in planted["files_are_those_of_their_wheels"]} == {
        f"{SITE}/tensorflow/python/platform/build_info.py in layer added",
        f"{SITE}/fsspec-{load('tf-cpu').locked().versions['fsspec']}.dist-info/METADATA in layer added",
    }
    settings = {one.where for one in planted["nothing_else_is_configured"]}
    assert settings == {"ENV HF_TOKEN", "ENV REQUESTS_CA_BUNDLE"}


def test_a_size_over_the_budget_names_the_largest_layers_and_packages(faultless: tuple[Evidence, Findings]) -> None:
    evidence, _ = faultless
    recipe = evidence.required_recipe
    budget = recipe.budget.model_copy(update={"size": 10**9})
    tight = dataclasses.replace(evidence, recipe=recipe.model_copy(update={"budget": budget}))
    (finding,) = core.check(tight)["size_within_budget"]
    assert finding.fails and "over the budget of 1.00 GB: wheel-tensorflow-cpu 1." in finding.what
    assert "of packages tensorflow_cpu 1." in finding.what


def test_a_faulty_image_fails_in_one_line_and_is_recorded_as_failed(
    planted_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    spec = load("tf-cpu")
    recipe = recipes.for_image(spec, ENGINE.image(planted_image, made_by="docker build").labels)
    with pytest.raises(StepFailed) as failed:
        verify.verify(recipe, planted_image, spec.context)
    line = str(failed.value)
    assert "\n" not in line and "/opt/trainyard/recipe.json: summary is" in line and "more findings" in line
    digest = ENGINE.digest(planted_image)
    facts: dict[str, Any] = state.recall(state_folder() / "tf-cpu", "verify", digest) or {}
    assert facts["passed"] is False and len(facts["findings"]) >= len(EXPECTED)
    with pytest.raises(UserError, match="never passed 'verify'"):
        state.require(state_folder() / "tf-cpu", digest, "verify")


def test_layers_read_the_same_from_the_store_and_from_a_saved_image(built_image: Callable[[str], str]) -> None:
    """The slow way is the one of engines on other hosts and of users who are not root."""
    reference = running.image()
    digest = ENGINE.digest(reference)
    store = image_store._store_with(ENGINE, digest)
    assert store is not None, "these tests run where the engine runs, as root"
    architecture = architectures.of_engine(ENGINE)
    quick = image_store._read_store(store, digest, architecture, layers.scan)
    assert quick == image_store._read_saved(ENGINE, reference, digest, architecture, layers.scan)
    assert len(quick.layers) >= 2 and len(quick.layers[0].found.files) > 1000


def test_an_image_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match=r"no local image trainyard:nowhere: run 'trainyard dev build tf-cpu' first"):
        verify.verify(recipes.make(load("tf-cpu")), "trainyard:nowhere", CONTEXT)


def test_an_image_without_python_is_one_line() -> None:
    with pytest.raises(StepFailed, match=r"cannot run its Python|cannot list what is installed"):
        probe_runner.probe(ENGINE, running.image())
