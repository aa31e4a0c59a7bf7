"""What is installed: pins for every Python that is allowed, links that work on an index, docs that name all pages."""

import importlib.util
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import autokern

ROOT = Path(__file__).parents[1]
PINS = [Requirement(line) for line in (ROOT / "tests" / "constraints.txt").read_text().splitlines() if "==" in line]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_each_python_has_one_pin_of_a_package(python):
    valid = [pin for pin in PINS if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    assert max(Counter(pin.name for pin in valid).values()) == 1
    pinned = {pin.name: str(pin.specifier) for pin in valid}
    assert {"numpy", "scipy", "torch", "pytest", "hypothesis"} <= set(pinned)
    old = {"numpy": "==2.2.6", "scipy": "==1.15.3", "pandas": "==2.3.3"}  # the last that have a build for 3.10
    assert (python == "3.10") == (old.items() <= pinned.items())
    assert ("botorch" in pinned) == (python != "3.10")


def test_the_version_is_stated_once():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'path = "autokern/core/releases/__init__.py"' in text
    assert not re.search(r"^version = ", text, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", autokern.__version__)


def test_the_recipe_for_conda_says_what_the_project_says():
    """conda-build is not among the test dependencies: fields are compared, nothing is built."""
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version: "{autokern.__version__}"' in recipe
    host, run = (
        set(re.findall(r"^    - (\S.*)$", recipe.partition(f"  {part}:\n")[2].partition("\n\n")[0], re.MULTILINE))
        for part in ("host", "run")
    )
    python = "python " + re.search(r'requires-python = "(.*)"', text)[1]
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    pairs = re.findall(r'"([\w-]+)(>=[\d.]+)"', needed)
    assert len(pairs) == needed.count('"') // 2
    assert run == {python, *(f"{'pytorch' if name == 'torch' else name} {least}" for name, least in pairs)}
    builds_with = re.search(r'requires = \["(\w+)(.*?)"\]', text)
    assert {python, "pip", f"{builds_with[1]} {builds_with[2]}"} <= host
    for field in ("description", "license"):
        assert ": " + re.search(rf'^{field} = "(.*)"', text, re.MULTILINE)[1] + "\n" in recipe
    for name, target in re.findall(r'^(\w+) = "(autokern[\w.]+:\w+)"', text, re.MULTILINE):
        assert f"- {name} = {target}\n" in recipe


def test_the_readme_of_an_index_has_no_relative_links(monkeypatch):
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = (ROOT / "README.md").read_text()
    assert "](docs/" in text
    assert not re.search(r"\]\((?!https?://|#)", hook.for_an_index(text))
    there = hook.for_an_index(text, "https://example.org/autokern")
    assert "](https://example.org/autokern/docs/promises.md)" in there


def test_links_in_docs_lead_to_files():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            target = page.parent / link
            assert target.exists(), (page.name, link)
            assert page.name == "README.md" or target.resolve().is_relative_to(ROOT / "docs"), (page.name, link)


def test_links_to_headings_lead_to_headings():
    """A heading's anchor is its words in lower case and ASCII, for the site as for the repository."""
    pages = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    anchors = {
        path: {
            re.sub(r"\W+", "-", re.sub(r"[^\w\s-]", "", line)).lower() for line in re.findall(r"^#+ (.*)$", text, re.M)
        }
        for path, text in pages.items()
    }
    for page, text in pages.items():
        for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", text):
            target = (page.parent / link).resolve() if link else page
            assert anchor in anchors[target], (page.name, link, anchor)
            assert anchor.isascii()


@pytest.mark.parametrize("page", ["promises.md", "design.md"])
def test_the_files_that_a_page_names_exist(page):
    folders = "|".join(path.name for path in (ROOT / "autokern").iterdir() if path.is_dir())
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(rf"`((?:\.ci|tests|calibration|autokern|{folders})/[\w/]+(?:\.\w+)?)", text)
    assert named
    assert {name for name in named if not ((ROOT / name).exists() or (ROOT / "autokern" / name).exists())} == set()


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r": ([\w-]+\.md)$", (ROOT / ".mkdocs.yml").read_text(), re.MULTILINE))
    assert menu == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_api_page_names_what_is_public():
    text = (ROOT / "docs" / "api.md").read_text()
    missing = {name for name in autokern.__all__ if not re.search(rf"(- |autokern\.){name}\b", text)}
    assert missing == set()


@pytest.mark.parametrize("kind", [DeprecationWarning, FutureWarning])
def test_warnings_of_torch_about_scripting_abort_nothing(kind):
    warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`.", kind, stacklevel=1)
