"""The commands with which the server's machine and the sites' take part in a deployment."""

import ipaddress
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.deploy.keys import CERTIFICATE, KEY, ROOT
from benchmark.errors import ConfigurationError

NO_INSTALL = "--disable-runtime-dependency-installation"
#: Flower's port.
PORT = 8000


def installed(program: str) -> str:
    """Return the path of one of Flower's programs.

    Raises:
        ConfigurationError: it is not there.
    """
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        raise ConfigurationError(f"{program} is not installed: pip install '.[flower]'")
    return found


def server_command(host: str, port: int, keys: Path | None) -> list[str]:
    """Return the command of the server's machine.

    Args:
        host: address on which it listens.
        port: of it.
        keys: folder that ``benchmark deploy keys`` has written; None without TLS, on the loopback interface alone.

    Raises:
        ConfigurationError: TLS is missing, or a file of it.
    """
    listens = (f"--host={host}", f"--port={port}")
    if keys is None:
        _check_loopback(host)
        return [installed("flower-superlink"), "--insecure", NO_INSTALL, *listens]
    root, certificate, key = (_file(keys, name) for name in (ROOT, CERTIFICATE, KEY))
    secured = (f"--ssl-ca-certfile={root}", f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}")
    return [installed("flower-superlink"), *secured, "--enable-supernode-auth", NO_INSTALL, *listens]


def client_command(
    name: str, server: str, keys: tuple[Path, Path] | None, settings: dict[str, str], port: int | None = None
) -> list[str]:
    """Return the command of a site.

    Args:
        name: of the client.
        server: host and port.
        keys: the server's root certificate and the site's private key; None without TLS.
        settings: of the node: ``data``, ``data-dir``, ``state``.
        port: of the node on its own machine, on the loopback interface.

    Raises:
        ConfigurationError: TLS is missing, a file of it, or a path that Flower's configuration cannot hold.
    """
    host, _, number = server.rpartition(":")
    if not host or not number.isdecimal():
        raise ConfigurationError(f"--server is a host and a port, such as hub.example.org:{PORT}; got {server!r:.100}")
    config = " ".join(f"{key}={_quoted(value)}" for key, value in {"client": name, **settings}.items())
    command = [installed("flower-supernode"), f"--superlink={server}", "--node-config", config]
    if port is not None:
        command.append(f"--port={port}")
    if keys is None:
        _check_loopback(host)
        return [*command, "--insecure"]
    root, key = keys
    for path in keys:
        _file(path.parent, path.name)
    return [*command, f"--root-certificates={root}", f"--auth-supernode-private-key={key}"]


def address_of(host: str, port: int) -> str:
    """Return under which address this machine reaches a server of its own.

    Args:
        host: address on which the server listens; all addresses of the machine have this machine among them.
        port: of it.
    """
    plain = host.strip("[]")
    if plain in ("0.0.0.0", "::"):
        plain = "127.0.0.1"
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"


def connection(server: str, root: Path | None) -> str:
    """Return what tells ``flwr run`` where the server is: a part of Flower's ``config.toml``."""
    tls = "insecure = true" if root is None else f"root-certificates = {_quoted(str(root.absolute()))}"
    return f'[superlink]\ndefault = "federation"\n\n[superlink.federation]\naddress = "{server}"\n{tls}\n'


def _quoted(value: str) -> str:
    if any(each in value for each in "'\"\\\n"):
        raise ConfigurationError(f"{value!r}: quotes and backslashes can't be given to Flower; choose another path")
    return json.dumps(value, ensure_ascii=False)


def _file(folder: Path, name: str) -> Path:
    path = (folder / name).absolute()
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing; `benchmark deploy keys` writes it")
    return path


def _check_loopback(host: str) -> None:
    """Refuse to be without TLS where others could listen.

    Raises:
        ConfigurationError: the host is not this machine's own.
    """
    plain = host.strip("[]")
    try:
        inside = plain == "localhost" or ipaddress.ip_address(plain).is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise ConfigurationError(
            f"without TLS a deployment stays on this machine (127.0.0.1), and {host} is another machine; make keys "
            "with `benchmark deploy keys`, and give them with --keys at the server, --root and --key at a site"
        )


def shown(command: Sequence[str]) -> str:
    """Return a command as one types it."""
    import shlex

    return shlex.join(command)
