"""Bearer tokens with scopes. The configuration holds SHA-256 digests; a key itself is never stored or logged.

Make a key, and the line for `keys` (or for a line of `keys_file`), with

    python -m services.gateway.auth NAME [SCOPE ...]
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.gateway.problems import Problem
from shared.config import ConfigError

SCOPES = ("prompts:write", "rewards:write", "trajectories:read", "trajectories:write", "admin")
"""`admin` includes the others."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    digest: str
    """SHA-256 of the key, lower-case hex."""
    scopes: frozenset[str]

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


LOCAL = ApiKey(name="local", digest="", scopes=frozenset(SCOPES))
"""The caller where no key is configured, which only a loopback bind allows."""


def is_loopback(host: str) -> bool:
    """True for an address or name that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_key(line: str) -> ApiKey:
    """`name:sha256-hex:scope,scope`. Raises ConfigError."""
    parts = line.strip().split(":", 2)
    name, digest, scopes = [*parts, "", ""][:3]
    given = frozenset(s.strip() for s in scopes.split(",") if s.strip())
    if not name or len(digest) != 64 or any(c not in "0123456789abcdef" for c in digest):
        raise ConfigError(
            f"an API key is name:sha256-hex:scope,scope; the entry of {name!r} is not (a plain key is never put here). "
            "Make one with: python -m services.gateway.auth NAME SCOPE ..."
        )
    if not given or not given <= set(SCOPES):
        raise ConfigError(f"API key {name!r}: scopes must be some of {', '.join(SCOPES)}, got {scopes!r}")
    return ApiKey(name=name, digest=digest, scopes=given)


class Keyring:
    """The configured keys.

    Args:
        lines: entries as `parse_key` reads them.
        keys_file: a file with one entry a line ("" for none; `#` starts a comment).

    Raises: ConfigError.
    """

    def __init__(self, lines: Iterable[str], keys_file: str = "") -> None:
        lines = list(lines)
        if keys_file:
            try:
                lines += Path(keys_file).read_text().splitlines()
            except OSError as error:
                raise ConfigError(f"cannot read keys_file {keys_file}: {error}") from error
        self._keys = [parse_key(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
        names = [k.name for k in self._keys]
        if len(set(names)) != len(names):
            raise ConfigError(f"API key names must differ, got {sorted(names)}")

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, authorization: str | None) -> ApiKey:
        """Args: authorization: the header's value. Raises Problem 401."""
        if not self._keys:
            return LOCAL
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        # Every key is compared, so that the time taken says nothing about which one came close.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None or scheme.lower() != "bearer":
            given = "no token" if not token else "an unknown token"
            raise Problem(
                "unauthenticated",
                f"got {given}; send `Authorization: Bearer KEY`",
                headers={"WWW-Authenticate": 'Bearer realm="timzero"'},
            )
        return found


def check_bind(host: str, keyring: Keyring) -> None:
    """Raises ConfigError where anyone on the network could use the API."""
    if not len(keyring) and not is_loopback(host):
        raise ConfigError(
            f"host {host} can be reached from other machines and no API key is configured. Bind 127.0.0.1, or add a key: "
            "python -m services.gateway.auth NAME SCOPE ..."
        )


def check_local_caller(host_header: str, origin: str | None) -> None:
    """Without keys, refuses what a web page could send to this machine's loopback (rebound names, foreign origins).

    Raises: Problem 403.
    """
    host = host_header.rsplit(":", 1)[0] if not host_header.endswith("]") else host_header
    if not is_loopback(host):
        raise Problem("foreign-origin", f"Host is {host_header!r}; without API keys only loopback names are served")
    if origin is not None and not is_loopback(origin.split("://")[-1].rsplit(":", 1)[0]):
        raise Problem("foreign-origin", f"Origin is {origin!r}; without API keys only local pages are served")


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(f"usage: python -m services.gateway.auth NAME [SCOPE ...]\nscopes: {', '.join(SCOPES)} (default: admin)")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    key = "tz_" + secrets.token_urlsafe(32)
    line = f"{argv[0]}:{hashlib.sha256(key.encode()).hexdigest()}:{','.join(argv[1:] or ['admin'])}"
    try:
        parse_key(line)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"key (shown once): {key}\nfor keys or keys_file: {line}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
