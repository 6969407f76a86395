# SPDX-License-Identifier: Apache-2.0
"""Which files of evidence there are: the list that makes a deleted file noticed.

`index.txt` lies beside the files and has a line for each, `NAME SHA256`; lines are only ever added,
in any order, so that git can merge two lists by keeping the lines of both (.gitattributes). A file
that is listed and not there, or not with that hash, is refused; one that is not listed yet is
listed by the next run that adds one. Who takes a line out together with its file is found by git:
no commit may have removed or changed a file of evidence.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .digests import file_sha

INDEX = "index.txt"
PATTERN = "parity/evidence/*.jsonl"


class ListError(ValueError):
    """A list of evidence that is torn, or a file that it names and that is gone or another."""


def listed(folder: Path) -> dict[str, str]:
    """Name -> sha256 of every listed file; ListError where a line is none or contradicts one."""
    path = folder / INDEX
    found: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        name, _, sha = line.partition(" ")
        if len(sha) != 64 or found.setdefault(name, sha) != sha:
            raise ListError(f"{INDEX}:{number}: not a file's name and sha256, or another one")
    return found


def enter(folder: Path) -> None:
    """List every file of `folder` that isn't."""
    known = listed(folder)
    new = [path for path in sorted(folder.glob("*.jsonl")) if path.name not in known]
    with (folder / INDEX).open("a", encoding="utf-8") as file:
        file.writelines(f"{path.name} {file_sha(path)}\n" for path in new)


def check(folder: Path) -> None:
    """ListError unless every listed file is there as it was."""
    for name, sha in listed(folder).items():
        path = folder / name
        if not path.is_file():
            raise ListError(
                f"{name} is listed in {INDEX} and gone; evidence is never deleted: "
                f"`git log -- parity/evidence/{name}` shows when, `git checkout` brings it back"
            )
        if file_sha(path) != sha:
            raise ListError(f"{name} is not the file that {INDEX} lists")


def unlisted(folder: Path) -> list[str]:
    """Files that the list lacks."""
    known = listed(folder)
    return [path.name for path in sorted(folder.glob("*.jsonl")) if path.name not in known]


def removed(root: Path) -> list[str]:
    """ "COMMIT PATH" of every file of evidence that a commit of this history removed or changed;
    nothing where there is no git, or no history, to ask."""
    command = ["git", "log", "--no-renames", "-m", "--diff-filter=DMT", "--format=%h"]
    try:
        done = subprocess.run(
            [*command, "--name-only", "--", PATTERN],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found, commit = [], ""
    for line in done.stdout.split() if done.returncode == 0 else []:
        if line.endswith(".jsonl"):
            found.append(f"{commit} {line}")
        else:
            commit = line
    return list(dict.fromkeys(found))
