# SPDX-License-Identifier: Apache-2.0
"""The wheel: conf/ is in it, nothing generic is at its top, and it works from any folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=200, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_conf_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllmx"}
    for path in (ROOT / "conf").rglob("*.yaml"):
        if "local" not in path.parts:
            assert f"vllmx/conf/{path.relative_to(ROOT / 'conf').as_posix()}" in names
    for path in (ROOT / "vllmx").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    assert "vllmx/py.typed" in names
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert b"vllmx = vllmx.cli:main" in zipfile.ZipFile(wheel).read(entry_points)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_works_from_the_root_folder(wheel: Path, tmp_path: Path) -> None:
    """In an environment that sees the dependencies of this one, but not this checkout."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    site = next(env.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [f"import sys; sys.path.extend({dependencies!r})\n"]  # appended: .pth files stay unread
    (site / "dependencies.pth").write_text("".join(lines))
    code = (
        "import importlib.util as u, vllmx; from vllmx.compose import conf_dir; print(conf_dir())"
    )
    code += "; print([n for n in ('conf', 'parity', 'oracles', 'tests') if u.find_spec(n)])"
    python = str(env / "bin" / "python")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [python, "-c", code],
        cwd="/",
        env=clean,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.split("\n")[:2] == [str(site / "vllmx" / "conf"), "[]"]
    shown = subprocess.run(
        [python, "-m", "vllmx", "generate", "smollm2-135m", "--cfg", "job", "scheduler=latency"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "name: smollm2-135m" in shown.stdout and "max_num_seqs: 8" in shown.stdout
