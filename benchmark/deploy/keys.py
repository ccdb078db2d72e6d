"""Certificates and keys of a deployment: its server proves who it is by TLS, its sites by keys of their own."""

import datetime
import ipaddress
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from benchmark.deploy.agreement import run_name
from benchmark.errors import ConfigurationError
from benchmark.files import make_folder

#: Days for which certificates hold.
DAYS = 825
ROOT, CERTIFICATE, KEY = "ca.pem", "server.pem", "server.key"
#: A name of the Domain Name System: labels of letters, digits and dashes between dots; the last one is no number.
_LABEL = r"[0-9A-Za-z_]([0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?"
DNS_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?!(.*\.)?[0-9]+\.?\Z){_LABEL}(\.{_LABEL})*\.?", re.ASCII)


def write_keys(folder: Path, hosts: Sequence[str], sites: Sequence[str]) -> None:
    """Write a root certificate, the server's certificate and key, and a pair of keys for each site.

    The root's own key is thrown away: nobody can make another server's certificate of it.

    Args:
        folder: new, there whole or not at all.
        hosts: names and IP addresses under which sites reach the server.
        sites: a name each.

    Raises:
        ConfigurationError: the folder is there, a host is no name and no address, or a site's name is no file's.
    """
    if folder.exists() or folder.is_symlink():
        raise ConfigurationError(f"{folder} exists; keys are made once: name a new folder")
    names = [run_name(site) for site in sites]
    if twice := sorted({name for name in names if [each.lower() for each in names].count(name.lower()) > 1}):
        raise ConfigurationError(f"two sites are called {twice[0]}; each needs a name of its own, whatever its case")
    if odd := next((host for host in hosts if not host.isascii()), None):
        raise ConfigurationError(f"a host's name in a certificate is ASCII, got {odd!r:.100}; give its xn-- form")
    for host in hosts:
        _host(host)
    if taken := [name for name in names if name.lower() in ("ca", "server")]:
        raise ConfigurationError(f"a site can't be called {taken[0]}, which is the name of the server's own files")
    make_folder(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    root_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    root = _certificate("federation root", root_key.public_key(), "federation root", root_key, ())
    reached = dict.fromkeys((*hosts, "localhost", "127.0.0.1"))  # the server's own processes reach it there
    server = _certificate(hosts[0], server_key.public_key(), "federation root", root_key, [*reached])
    _write(building / ROOT, root.public_bytes(Encoding.PEM))
    _write(building / CERTIFICATE, server.public_bytes(Encoding.PEM))
    _write(building / KEY, server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), secret=True)
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        _write(building / f"{name}.key", private, secret=True)
        _write(building / f"{name}.pub", public + b"\n")
    building.rename(folder)


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, issuer: str, signer: ec.EllipticCurvePrivateKey, hosts: Sequence[str]
) -> x509.Certificate:
    """Return a certificate: the server's, for some hosts, or without them the root's."""
    now, is_root = datetime.datetime.now(datetime.UTC), not hosts
    made = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=0 if is_root else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_uses(is_root), critical=True)
    )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return made.sign(signer, hashes.SHA384())


def _uses(is_root: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    unused = dict.fromkeys((*others, "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not is_root, key_cert_sign=is_root, crl_sign=is_root, **unused)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(given: str) -> x509.GeneralName:
    """Return a host as a certificate names it.

    Raises:
        ConfigurationError: it is no IP address, and no name of the Domain Name System.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(given))
    except ValueError:
        if DNS_NAME.fullmatch(given):
            return x509.DNSName(given)
    raise ConfigurationError(
        f"--host: expected an IP address or a name like hub.example.org, without https:// and port, got {given!r:.80}"
    )


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    """Write a file, one with a secret for its owner alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
