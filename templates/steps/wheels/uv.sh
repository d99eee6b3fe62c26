# Sourced before uv: the addresses, credentials and certificates of package indexes, which are secrets of the step.
# shellcheck shell=sh
[ ! -s /run/secrets/ca ] || export SSL_CERT_FILE=/run/secrets/ca
[ ! -s /run/secrets/uv.toml ] || export UV_CONFIG_FILE=/run/secrets/uv.toml NETRC=/run/secrets/netrc
[ -z "${INDEX_URL-}" ] || export UV_INDEX="$INDEX_URL" UV_INDEX_STRATEGY=unsafe-best-match
# The same address with credentials, which a list of processes would show as an option.
[ ! -s /run/secrets/index ] || UV_INDEX=$(cat /run/secrets/index)
