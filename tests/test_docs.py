"""The documentation: generated pages are up to date, links lead somewhere, examples run, images pass the linter."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import repeat_drafter

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")])


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["configuration", "results", "readme"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    script = ROOT / "docs" / f"make_{name}.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_commands_that_are_named_exist(page: Path) -> None:
    for name in re.findall(
        r"`((?:bench|docs|docker|configs|freedraft|sssd_plugin|layerskip_plugin|tests)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / name).exists(), f"{name} is not there"


@pytest.mark.parametrize("name", ["promises.md", "gpu.md"])
def test_every_promise_is_kept_by_tests_that_exist(name: str) -> None:
    """Those with a * run in `make test-all` only, and all others in `make test`."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for row in re.findall(r"^\| (?!promise |finding |---)(.*?) \| (.*) \|$", page, re.MULTILINE):
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`(\*?)", row[1])
        assert tests or not row[1].startswith(("mended", "`tests")), row[0]
        assert tests or name != "promises.md", row[0]
        for path, test, later in tests:
            source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
            found = re.search(rf"^((?:@.*\n|[ )].*\n)*)def {test}\(", source, re.MULTILINE)
            assert found, f"{row[0]}: no test {path}::{test}"
            assert ("\n@pytest.mark.extended" in "\n" + found[1]) == bool(later), f"{path}::{test}: with a * or without"


def test_the_drafter_of_the_page_is_the_tested_one() -> None:
    page = (ROOT / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")
    drafter, _, test = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    source = Path(repeat_drafter.__file__).read_text(encoding="utf-8")
    assert drafter == source
    assert sum(1 for line in source.splitlines() if line.strip()) <= 50, "the page's title promises 50 lines"
    names = dict(vars(repeat_drafter))
    exec(test, names)
    names["test_it_repeats"]()


@pytest.mark.parametrize("image", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda p: p.name)
def test_images_are_not_root_and_say_how_they_are(image: Path) -> None:
    lines = [line.split() for line in image.read_text().splitlines() if line and not line.startswith((" ", "#"))]
    users = [line[1] for line in lines if line[0] == "USER"]
    assert users and users[-1].isdigit() and int(users[-1]) > 0
    assert any(line[0] == "HEALTHCHECK" for line in lines)
    assert any("dist/freedraft-*.whl" in line for line in lines if line[0] == "COPY")


def test_images_pass_the_linter() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    images = sorted((ROOT / "docker").glob("*.Dockerfile"))
    done = subprocess.run(
        [hadolint, "-c", str(ROOT / "docker" / ".hadolint.yaml"), *map(str, images)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
