"""Certificates of a test's own."""

import ipaddress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.fake_cluster.clock import START


@dataclass(frozen=True)
class Certificate:
    """A server's certificate, which is its own authority, and its key."""

    file: Path
    key: Path


def self_signed(folder: Path) -> Certificate:
    """Make a certificate for 127.0.0.1 that nobody trusts who is not told to."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(START - timedelta(days=3650))
        .not_valid_after(START + timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate = Certificate(folder / "certificate.pem", folder / "key.pem")
    certificate.file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    certificate.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, plain))
    return certificate
