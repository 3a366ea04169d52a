"""Real servers for storages: S3 by rclone, SSH by OpenSSH's sshd, and a proxy that loses a connection."""

import contextlib
import getpass
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.cluster.processes import free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
BUCKET = "models"
KEY, SECRET = "key", "secret-of-the-key"


@dataclass(frozen=True)
class S3Server:
    """An S3 server on this machine with one bucket."""

    endpoint: str
    credentials: ClassVar = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "2",
    }
    """The variables that a client needs, without the address."""


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Serve a folder as buckets, with one key that may do everything."""
    (folder / BUCKET).mkdir(parents=True)
    address = f"127.0.0.1:{free_port()}"
    rclone = Path(sys.executable).with_name("rclone")
    command = [str(rclone), "serve", "s3", str(folder), "--addr", address, "--auth-key", f"{KEY},{SECRET}"]
    with _running([*command, "--config", str(folder / "none.conf"), "--vfs-cache-mode", "off"], address):
        yield S3Server(f"http://{address}")


@dataclass(frozen=True)
class SSHServer:
    """An SSH server on this machine, where the user of this process may log in with a key."""

    folder: Path
    port: int
    home: Path
    """With the client's `.ssh/config` and key."""

    @property
    def url(self) -> str:
        """The folder's address."""
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}{self.folder}"


@contextmanager
def ssh_server(folder: Path) -> Iterator[SSHServer]:
    """Serve a folder over SSH."""
    port, keys, home = free_port(), folder / "keys", folder / "home"
    for each in (keys, home / ".ssh", folder / "storage"):
        each.mkdir(parents=True, mode=0o700)
    for path in (keys / "host", home / ".ssh/id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    shutil.copy(home / ".ssh/id_ed25519.pub", keys / "authorized")
    host_key = (keys / "host.pub").read_text()
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
    settings = f"HostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
    settings += "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
    settings += "Subsystem sftp internal-sftp\n"
    (keys / "sshd_config").write_text(settings)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    Path("/run/sshd").chmod(0o755)  # a test may have left a umask that lets the group write, which sshd refuses
    address = f"127.0.0.1:{port}"
    command = [str(SSHD), "-D", "-e", "-f", str(keys / "sshd_config"), "-o", f"ListenAddress={address}"]
    with _running(command, address):
        yield SSHServer(folder / "storage", port, home)


@contextmanager
def _running(command: list[str], address: str) -> Iterator[None]:
    """Run a server while the block lasts, from when it answers at an address."""
    host, _, port = address.partition(":")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise AssertionError(f"{command[0]} does not answer: {process.communicate()[1]}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
