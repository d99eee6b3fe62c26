"""Secrets in files: their forms, which the launcher hides, too, and text that only resembles them."""

from __future__ import annotations

import hashlib
import json

import pytest
from launcher import redact
from launcher.tokens import TOKENS

from trainyard.oci import secret_scan

#: Characters of a token; the parts of prefixes are apart, so that no scan of this repository finds a secret.
MIXED = "q7Zk2Vw9Xt4Rm8Lp3Ns6Bd1Hc5Jf0Gy" * 8
HEXADECIMAL = hashlib.sha256(b"secret").hexdigest()

TOKENS_OF = {
    "a Google access token": ["ya" + "29.a0" + MIXED[:60], "ya" + "29.c.b0A" + MIXED[:60]],
    "a Google refresh token": ["1/" + "/0g" + MIXED[:98]],
    "a Google API key": ["AI" + "za" + MIXED[:35]],
    "a Google OAuth client secret": ["GOC" + "SPX-" + MIXED[:28], "GOC" + "SPX---" + MIXED[:26]],
    "a GitHub token": [
        *("gh" + f"{kind}_" + MIXED[:36] for kind in "pous"),
        "gh" + "r_" + MIXED[:76],
        "github" + "_pat_" + MIXED[:22] + "_" + MIXED[:59],
    ],
    "a GitLab token": ["glp" + "at-" + MIXED[:20], "gl" + "dt-" + MIXED[:20]],
    "a Slack token": [
        "xo" + "xb-920394857201-920394857201-" + MIXED[:24],
        "xo" + "xe.xoxp-1-" + MIXED[:140],
        "xa" + "pp-1-A0" + MIXED[:8] + "-920394857201-" + HEXADECIMAL,
    ],
    "a Hugging Face token": ["h" + "f_" + MIXED[:34]],
    "an npm token": ["np" + "m_" + MIXED[:36]],
    "a PyPI token": ["py" + "pi-AgEIcHlwaS5vcmc" + MIXED[:150]],
    "a Docker Hub token": ["dckr" + "_pat_" + MIXED[:27], "dckr" + "_oat_" + MIXED[:32]],
    "a Stripe key": ["sk" + "_live_" + MIXED[:24], "rk" + "_live_" + MIXED[:99]],
    "an Anthropic API key": ["sk" + "-ant-api03-" + MIXED[:93] + "AA"],
    "an OpenAI API key": [
        "sk" + "-" + MIXED[:20] + "T3Blbk" + "FJ" + MIXED[:20],
        "sk" + "-proj-" + MIXED[:74] + "T3Blbk" + "FJ" + MIXED[:74],
    ],
    "a SendGrid key": ["S" + "G." + MIXED[:22] + "." + MIXED[:43]],
    "an NVIDIA NGC key": ["nv" + "api-" + MIXED[:64]],
    "a Databricks token": ["da" + "pi" + HEXADECIMAL[:32], "da" + "pi" + HEXADECIMAL[:32] + "-2"],
    "a Replicate token": ["r" + "8_" + MIXED[:37]],
    "a Groq API key": ["gs" + "k_" + MIXED[:52]],
    "an xAI API key": ["xa" + "i-" + MIXED[:80]],
    "an OpenRouter API key": ["sk" + "-or-v1-" + HEXADECIMAL],
    "a Neptune token": ["eyJhcGlf" + "YWRkcmVzcyI6" + MIXED[:120]],
    "a Kaggle token": ["KG" + "AT_" + HEXADECIMAL[:32]],
    "a Weights & Biases key": ["wandb" + "_v1_" + MIXED[:27] + "_" + MIXED[:49]],
}


@pytest.mark.parametrize(("kind", "token"), [(kind, one) for kind, tokens in TOKENS_OF.items() for one in tokens])
def test_what_the_launcher_hides_is_found_in_files(kind: str, token: str) -> None:
    for text in (f'key = "{token}"\n', f"KEY={token}", f"https://{token}@host/", f"<td>{token}</td>"):
        assert secret_scan.in_text(text.encode()) == [kind]
        assert token[6:] not in redact.without_tokens(text)


def test_every_form_of_the_launcher_that_files_are_searched_for_has_an_example() -> None:
    of_aws = {"an AWS key"}  # the id alone, which the launcher hides, is not refused in files
    assert {kind for _, _, rest, kind in TOKENS if rest} == TOKENS_OF.keys() | of_aws


KEY_ID = "AK" + "IAQ2W3E4R5T6Y7U2I3"
SECRET = MIXED[:20] + "/" + MIXED[:19]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"aws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n", "an AWS key"),
        (json.dumps({"AccessKeyId": KEY_ID, "SecretAccessKey": SECRET}), "an AWS key"),
        (json.dumps({"username": "me", "key": HEXADECIMAL[:32]}), "a Kaggle key"),
        (f"export KAGGLE_KEY={HEXADECIMAL[:32]}", "a Kaggle key"),
        (f'os.environ["WANDB_API_KEY"] = "{HEXADECIMAL[:40]}"', "a Weights & Biases key"),
        (f"- name: WANDB_API_KEY\n  value: {HEXADECIMAL[:40]}\n", "a Weights & Biases key"),
        (f"machine api.wandb.ai\n  login user\n  password {HEXADECIMAL[:40]}\n", "a Weights & Biases key"),
        (f'wandb.login(relogin=True, key="{HEXADECIMAL[:40]}")', "a Weights & Biases key"),
        (f"//npm.example/:_authToken={MIXED[:36]}\n", "an npm credential"),
        (f"NGC_API_KEY={MIXED[:84]}", "an NVIDIA NGC key"),
        (f'[default]\ntoken_id = "ak-{MIXED[:22]}"\ntoken_secret = "as-{MIXED[:22]}"\n', "a Modal token"),
        (f"AccountName=data;AccountKey={MIXED[:86]}==;EndpointSuffix=core.windows.net", "an Azure storage key"),
        (f'os.environ["AZURE_STORAGE_KEY"] = "{MIXED[:86]}=="', "an Azure storage key"),
        (f"AZURE_CLIENT_SECRET=q7Z8Q~{MIXED[:34]}", "an Azure client secret"),
        (f"export AWS_SECRET_ACCESS_KEY={SECRET}", "an AWS key"),
        (f'fs = S3(secret_access_key="{SECRET}")', "an AWS key"),
        (f"users:\n- name: me\n  user:\n    token: {MIXED[:60]}\n", "Kubernetes credentials"),
        (f"    client-key-data: {MIXED[:120]}\n", "Kubernetes credentials"),
        (json.dumps({"auths": {"registry.example.com": {"auth": MIXED[:24]}}}), "registry credentials"),
    ],
)
def test_secrets_without_a_form_are_known_by_the_words_before_them(text: str, kind: str) -> None:
    assert secret_scan.in_text(text.encode()) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "aws_access_key_id = AK"
        + "IAIOSFODNN7EXAMPLE\naws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        f"account {KEY_ID} made commit {HEXADECIMAL[:40]}",
        "headers = {'Authorization': 'Bearer gh" + "p_" + "x" * 36 + "'}",
        "token: gh" + "p_1234567890abcdefghijklmnopqrstuvwxyz",
        "AI" + "zaSy-your-api-key-goes-here-39-characters",
        "h" + "f_" + "a" * 34,
        "sk" + "-ant-api03-" + "your-key-here" * 8,
        f"task-sk-{MIXED[:60]}",
        f"see git+https://github.com/wandb/wandb@{HEXADECIMAL[:40]} and https://wandb.ai/login",
        "WANDB_API_KEY=${WANDB_API_KEY}",
        '{"username": "me", "key": "value"}',
        f"aws_secret_access_key = {HEXADECIMAL[:40]}",
        "client_secret = os.environ['CLIENT_SECRET']",
        "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
        '{"auths": {"registry.example.com": {}}, "credsStore": "desktop"}',
        "users:\n- name: me\n  user:\n    exec: {command: gke-gcloud-auth-plugin}\n",
        "//npm.example/:_authToken=${NPM_TOKEN}",
        # The output of a notebook: base64 in which a prefix stands by chance, between other characters of base64.
        '"image/png": "iVBORw0KGgo' + MIXED[:30] + "AI" + "za" + MIXED[:120] + "+/" + "AK" + "IA" + MIXED[:60] + '=="',
        f"sha256:{HEXADECIMAL} npm_config_cache hf_hub_download_with_a_long_function_name_of_words",
        "https://www.googleapis.com/v1//0/projects/" + "a-long-path-of-words-" * 5,
    ],
)
def test_text_that_only_resembles_a_secret_is_not_refused(text: str) -> None:
    assert secret_scan.in_text(text.encode(), "src/notes.md") == []


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (f"[s3]\ntype = s3\nsecret_access_key = {MIXED[:30]}\n", True),
        (f'[drive]\ntype = drive\ntoken = {{"access_token":"{MIXED[:30]}"}}\n', True),
        ("[s3]\ntype = s3\nprovider = GCS\nenv_auth = true\nsecret_access_key = ${SECRET_ACCESS_KEY}\n", False),
    ],
)
def test_the_configuration_of_rclone_is_refused_for_its_secrets(text: str, refused: bool) -> None:
    assert secret_scan.in_text(text.encode(), "conf/rclone.conf") == (["credentials of rclone"] if refused else [])


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        (".env.production", "DB_PASSWORD=" + MIXED[:12], True),
        ("deploy/.envrc", f"export API_KEY='{MIXED[:20]}'", True),
        (".env.local.example", "DB_PASSWORD=" + MIXED[:12], False),
        (
            ".env.production",
            "DB_PASSWORD=your-password-123\nAPI_KEY=<key>\nSECRET=${SECRET_1}\nTOKEN=changeme123",
            False,
        ),
        (".env.test", "DEBUG=1\nDB_PASSWORD=postgres\nNUM_TOKEN=12045678\nCREDENTIALS=keys/account1.json", False),
        (".environment.py", "API_KEY = '" + MIXED[:20] + "'", False),
    ],
)
def test_files_of_variables_are_refused_for_their_values(name: str, text: str, refused: bool) -> None:
    assert secret_scan.in_text(text.encode(), name) == (["an environment file with secrets"] if refused else [])
