# SPDX-License-Identifier: Apache-2.0
"""`nox -s demo` answers a prompt, `nox -s tests` passes all tests; each makes its environment."""

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

DEMO_PROMPT = "The capital of France is"


@nox.session
def demo(session: nox.Session) -> None:
    """Install vllmx and print the greedy answer of a small real model."""
    session.install(".")
    session.run(
        *["vllmx", "generate", "model=smollm2-135m", f"prompt={DEMO_PROMPT}"],
        *["sampling.temperature=0", "sampling.max_tokens=24"],
    )


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test; arguments after -- go to pytest."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and the rules of tests/rules.py."""
    session.install("ruff==0.17.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tests/rules.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check the annotations of vllmx with mypy."""
    session.install("-e", ".", "mypy>=1.15,<3", "types-PyYAML", "types-tqdm")
    session.run("mypy")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build dist/: an sdist, and from it the wheel, so that conf/local stays at home."""
    session.install("build")
    session.run("python", "-m", "build")
