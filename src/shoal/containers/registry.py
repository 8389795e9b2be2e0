"""The cluster's own registry: Debian's docker-registry with TLS. Its settings, certificate and logins, as text."""

from __future__ import annotations

from shoal.agent.document import HEADER

SERVICE = "docker-registry"
PACKAGES = ("docker-registry", "openssl", "apache2-utils")
CONFIG = "/etc/docker/registry/config.yml"
PLACE = "/etc/docker/registry/shoal"
"""The server's own files."""
CA, SERVER_KEY, SERVER_CERTIFICATE = f"{PLACE}/ca.crt", f"{PLACE}/server.key", f"{PLACE}/server.crt"
HTPASSWD = f"{PLACE}/htpasswd"
SETTINGS = "/etc/shoal/registry"
ADDRESS, LOGINS, PASSWORDS = f"{SETTINGS}/address", f"{SETTINGS}/logins", f"{SETTINGS}/passwords"
"""As `remote/image_registry.py` reads them."""
TRUSTED = "/usr/local/share/ca-certificates/shoal-registry.crt"
USER = "docker-registry"
RENEW_S = 30 * 86400
"""A certificate that ends within this time is made anew."""

MAKE_CERTIFICATE = r"""
set -e
umask 077
cd "$(mktemp -d)"
trap 'rm -rf "$PWD"' EXIT
cat > config << END
[req]
distinguished_name = name
prompt = no
[name]
CN = $1
[ca]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
nameConstraints = critical, permitted;DNS:$1
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = DNS:$1
END
key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }
key ca.key
openssl req -x509 -new -key ca.key -sha256 -days 3650 -config config -extensions ca -out ca.crt
key server.key
openssl req -new -key server.key -config config -out server.csr
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -sha256 -days 3650 \
    -extfile config -extensions server -out server.crt
install -m 0644 ca.crt server.crt "$2"
install -m 0600 server.key "$2"
"""
"""A CA for one name, which signs one certificate; its key is not kept. Run with the name and the directory."""
CERTIFICATE_FITS = (
    'openssl x509 -in "$2/server.crt" -noout -checkend "$3" > /dev/null 2>&1'
    ' && openssl x509 -in "$2/server.crt" -noout -checkhost "$1" | grep -q "does match"'
    ' && openssl verify -CAfile "$2/ca.crt" "$2/server.crt" > /dev/null 2>&1'
)
MAKE_HTPASSWD = r"""
set -e
umask 077
cd "$1"
: > "$2.new"
for name in *; do
    [ -f "$name" ] || continue
    htpasswd -iB "$2.new" "$name" < "$name" 2> /dev/null
done
chown "$3:" "$2.new"
mv "$2.new" "$2"
"""
HTPASSWD_FITS = '[ -e "$2" ] && [ "$(cut -d: -f1 "$2" | sort)" = "$(ls "$1" | sort)" ]'
"""Passwords do not change, so names tell whether all are there."""


def registry_config(directory: str, port: int) -> str:
    """docker-registry's settings. Every request needs a login."""
    return (
        HEADER + "version: 0.1\n"
        "log: {level: warn, accesslog: {disabled: true}}\n"
        "storage:\n"
        f"  filesystem: {{rootdirectory: {directory}}}\n"
        "  delete: {enabled: true}\n"
        "  cache: {blobdescriptor: inmemory}\n"
        "http:\n"
        f"  addr: :{port}\n"
        f"  tls: {{certificate: {SERVER_CERTIFICATE}, key: {SERVER_KEY}}}\n"
        "  headers: {X-Content-Type-Options: [nosniff]}\n"
        "auth:\n"
        f"  htpasswd: {{realm: shoal, path: {HTPASSWD}}}\n"
    )
