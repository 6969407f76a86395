# SPDX-License-Identifier: Apache-2.0
"""Sources of upstream by version or place: its release archive, a tar, a zip or a folder."""

from __future__ import annotations

import re
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vllmx.exceptions import UserError

from .upstream_shim.mapping import load_map
from .upstream_tests import MAP, cache_folder, fetch, find_in_index, sha256_of

PROJECT = "vllm"
WANTED = re.compile(r"(?:vllm/.+\.py|csrc/.+\.(?:cpp|cu|h|cuh))$")
VERSION = re.compile(r"\d+(?:\.\d+)+(?:[a-z]+\d+)?$")


def read_sources(place: str) -> tuple[str, dict[str, str]]:
    """(version, path -> text of the Python and kernel sources) of upstream.

    `place` is a version, whose archive is fetched from pip's index unless it is cached, or an
    archive, or a folder with vllm/ in it. UserError where there is no such thing.
    """
    path = fetch_version(place) if VERSION.match(place) else Path(place).expanduser()
    if not path.exists():
        raise UserError(f"census: {place} is neither a version, nor an archive, nor a folder.")
    texts = dict(_texts(path))
    top = _top(texts)
    inner = {name[len(top) :]: text for name, text in texts.items() if name.startswith(top)}
    sources = {name: text for name, text in sorted(inner.items()) if WANTED.match(name)}
    if not any(name.startswith("vllm/") for name in sources):
        raise UserError(f"census: {place} holds no vllm/ with Python files.")
    version = inner.get("PKG-INFO", "")
    match = re.search(r"^Version: (\S+)$", version, re.MULTILINE)
    return (match[1] if match else path.name.removesuffix(".tar.gz")), sources


def fetch_version(version: str) -> Path:
    """The source archive of an exact version; its hash is the pinned one, or the index's own."""
    upstream_map = load_map(MAP)
    if upstream_map.archive["requirement"] == f"{PROJECT}=={version}":
        return fetch(upstream_map)
    path = cache_folder() / f"{PROJECT}-{version}.tar.gz"
    if path.is_file():
        return path
    url = find_in_index(PROJECT, path.name)
    told = urllib.parse.parse_qs(urllib.parse.urlsplit(url).fragment).get("sha256", [""])[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with urllib.request.urlopen(url.partition("#")[0]) as answer:
            part.write_bytes(answer.read())
        if not told or sha256_of(part) != told:
            raise UserError(f"census: {path.name} has not the SHA-256 that the index names.")
        part.replace(path)
    except OSError as error:
        raise UserError(f"census: {path.name}: {error}; or give an archive's path.") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """(path in it, text) of every file that may be wanted, and of PKG-INFO."""
    if path.is_dir():
        for file in path.rglob("*"):
            name = file.relative_to(path).as_posix()
            if _maybe(name) and file.is_file():
                yield name, file.read_text(encoding="utf-8", errors="replace")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if _maybe(name):
                    yield name, archive.read(name).decode("utf-8", "replace")
    else:
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    inner = archive.extractfile(member) if _maybe(member.name) else None
                    if inner is not None:
                        yield member.name, inner.read().decode("utf-8", "replace")
        except tarfile.TarError as error:
            raise UserError(f"census: {path} is neither a tar nor a zip: {error}") from error


def _maybe(name: str) -> bool:
    return name.endswith((".py", ".cpp", ".cu", ".h", ".cuh", "PKG-INFO"))


def _top(names: dict[str, str]) -> str:
    """The folder of an archive that everything lies in, such as `vllm-0.25.0/`; may be empty."""
    if any(name.startswith("vllm/") for name in names):
        return ""
    tops = {name.split("/")[0] for name in names if "/vllm/" in f"/{name}"}
    inside = [top for top in sorted(tops) if any(n.startswith(f"{top}/vllm/") for n in names)]
    return f"{inside[0]}/" if inside else ""
