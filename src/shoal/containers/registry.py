"""The cluster's own registry: Debian's docker-registry. Its settings, certificate and logins, as text.

docker-registry knows no rights. It listens on a socket that its user alone can open, and Apache is before it, with TLS
and the users' logins: all users read all images, and each writes below the own name.
"""

from __future__ import annotations

from shoal.agent.document import HEADER, daemon_unit, render_unit

SERVICE, PROXY = "docker-registry", "shoal-registry"
PACKAGES = ("docker-registry", "openssl", "apache2-bin", "apache2-utils")
CONFIG = "/etc/docker/registry/config.yml"
PLACE = "/etc/docker/registry/shoal"
"""The server's own files."""
DROP_IN = f"/etc/systemd/system/{SERVICE}.service.d/shoal.conf"
SOCKET_DIRECTORY, PROXY_DIRECTORY = "/run/shoal-registry", "/run/shoal-registry-proxy"
PROXY_UNIT, PROXY_CONFIG = f"/etc/systemd/system/{PROXY}.service", f"{PLACE}/apache2.conf"
PROXY_MODULES = (
    *("mpm_event", "authn_core", "authn_file", "authz_core", "authz_user", "auth_basic"),
    *("proxy", "proxy_http", "ssl"),
)
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


def registry_config(directory: str) -> str:
    """docker-registry's settings. Only the proxy reaches it, so it asks for no login."""
    return (
        HEADER + "version: 0.1\n"
        "log: {level: warn, accesslog: {disabled: true}}\n"
        "storage:\n"
        f"  filesystem: {{rootdirectory: {directory}}}\n"
        "  cache: {blobdescriptor: inmemory}\n"
        "http:\n"
        "  net: unix\n"
        f"  addr: {SOCKET_DIRECTORY}/socket\n"
        "  relativeurls: true\n"
        "  headers: {X-Content-Type-Options: [nosniff]}\n"
    )


def drop_in() -> str:
    """A directory for the socket that other users cannot enter."""
    return render_unit(
        Service={"RuntimeDirectory": SOCKET_DIRECTORY.removeprefix("/run/"), "RuntimeDirectoryMode": "0700"}
    )


def proxy_config(name: str, port: int) -> str:
    """Apache's settings. Every request needs a login, and each that is no GET or HEAD a path below the login's name.

    Apache resolves `..` and `%2e` before it compares, and passes on what it has compared.
    """
    modules = "".join(f"LoadModule {module}_module modules/mod_{module}.so\n" for module in PROXY_MODULES)
    return (
        HEADER + "ServerRoot /usr/lib/apache2\n"
        f"DefaultRuntimeDir {PROXY_DIRECTORY}\n"
        f"PidFile {PROXY_DIRECTORY}/pid\n"
        f"ErrorLog syslog:daemon:{PROXY}\n"
        f"{modules}"
        "LogLevel error authz_core:crit\n"  # every first request of a client lacks its login
        f"ServerName {name}\n"
        f"Listen {port}\n"
        "SSLEngine on\n"
        "SSLProtocol -all +TLSv1.2 +TLSv1.3\n"
        f"SSLCertificateFile {SERVER_CERTIFICATE}\n"
        f"SSLCertificateKeyFile {SERVER_KEY}\n"
        "LimitRequestBody 0\n"
        "Timeout 600\n"
        "ProxyTimeout 3600\n"  # docker-registry reads a whole layer before it says that it has it
        f'ProxyPass "/" "unix:{SOCKET_DIRECTORY}/socket|http://localhost/" retry=0\n'
        '<Location "/">\n'
        "    AuthType Basic\n"
        "    AuthName shoal\n"
        "    AuthBasicProvider file\n"
        f"    AuthUserFile {HTPASSWD}\n"
        "    <RequireAll>\n"
        "        Require valid-user\n"
        "        <RequireAny>\n"
        "            Require method GET HEAD\n"
        '            Require expr "%{REQUEST_URI} =~ m#^/v2/([^/]+)/# && $1 == %{REMOTE_USER}"\n'
        "        </RequireAny>\n"
        "    </RequireAll>\n"
        "</Location>\n"
    )


def proxy_unit() -> str:
    return daemon_unit(
        "TLS and logins before the registry of images",
        f"/usr/sbin/apache2 -f {PROXY_CONFIG} -DFOREGROUND",
        5,
        {"After": f"network-online.target {SERVICE}.service", "Wants": f"network-online.target {SERVICE}.service"},
        {
            "User": USER,
            "RuntimeDirectory": PROXY_DIRECTORY.removeprefix("/run/"),
            "RuntimeDirectoryMode": "0700",
            "NoNewPrivileges": "true",
        },
    )
