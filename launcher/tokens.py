"""Tokens with a known form: the launcher hides them in its output, and a build refuses files that contain one.

Data only: scripts/trainyard/oci/secret_scan.py, which imports nothing that runs inside images, reads TOKENS as text.
"""

# Prefixes; least number of characters after one for the launcher to hide it, whole or not; and for files, in which an
# exact form avoids false alarms, a regular expression of the rest and the kind. Files may contain those without one.
# Forms: GitHub's list (https://docs.github.com/en/code-security/reference/secret-security/supported-secret-scanning-patterns),
# the issuers' documentation, and tokens that they have issued. OpenAI's contain "OpenAI" in base64.
TOKENS = (
    (("ya29.",), 4, r"[\w.-]{30,}", "a Google access token"),
    (("1//0",), 40, r"[\w-]{60,}", "a Google refresh token"),
    (("AIza",), 16, r"[\w-]{35}", "a Google API key"),
    (("GOCSPX-",), 16, r"[\w-]{28}", "a Google OAuth client secret"),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), 4, r"[A-Za-z0-9]{36,251}", "a GitHub token"),
    (("github_pat_",), 4, r"\w{82}", "a GitHub token"),
    (("glpat-", "gldt-"), 4, r"[\w-]{20,}", "a GitLab token"),
    # The id alone is public: its secret, 40 characters that are not a hexadecimal digest, follows it.
    (("AKIA", "ASIA"), 16, r"[A-Z2-7]{16}(?=.{1,200}?(?<![\w+/])(?![\da-f]{40})[\w+/]{40}(?![\w+/=]))", "an AWS key"),
    (("xoxa-", "xoxb-", "xoxe-", "xoxp-", "xoxr-", "xoxs-", "xapp-"), 4, r"\d+-[\w-]{20,}", "a Slack token"),
    (("hf_",), 16, r"[A-Za-z0-9]{34}", "a Hugging Face token"),
    (("npm_",), 16, r"[A-Za-z0-9]{36}", "an npm token"),
    (("pypi-",), 16, r"AgE[\w-]{50,}", "a PyPI token"),
    (("dckr_pat_", "dckr_oat_"), 4, r"[\w-]{27}(?:[\w-]{5})?", "a Docker Hub token"),
    (("sk_live_", "rk_live_"), 4, r"[A-Za-z0-9]{24,247}", "a Stripe key"),
    (("sk-ant-",), 4, r"[a-z]+\d\d-[\w-]{80,}", "an Anthropic API key"),
    (("sk-",), 16, r"[\w-]{20,110}T3BlbkFJ[\w-]{20,110}", "an OpenAI API key"),
    (("SG.",), 16, r"[\w-]{22}\.[\w-]{43}", "a SendGrid key"),
    (("KGAT_",), 16, r"[0-9a-f]{32}", "a Kaggle token"),
    (("wandb_v1_",), 16, r"\w{60,}", "a Weights & Biases key"),
    (("nvapi-",), 16, r"[\w-]{60,70}", "an NVIDIA NGC key"),
    (("dapi",), 32, r"[0-9a-f]{32}(?:-\d)?", "a Databricks token"),
    (("r8_",), 16, r"[A-Za-z0-9]{37}", "a Replicate token"),
    (("gsk_",), 16, r"[A-Za-z0-9]{52}", "a Groq API key"),
    (("xai-",), 16, r"[A-Za-z0-9]{80}", "an xAI API key"),
    (("sk-or-v1-",), 16, r"[0-9a-f]{64}", "an OpenRouter API key"),
    # {"api_address": in base64
    (("eyJhcGlfYWRkcmVzcyI6",), 16, r"[\w+/=-]{40,}", "a Neptune token"),
    (("eyJ",), 10, "", ""),
    (("Bearer ", "bearer "), 1, "", ""),
)
