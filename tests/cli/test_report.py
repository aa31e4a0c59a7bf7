"""Reports: what a page says, that a program's end is as ever, and that a real browser shows it."""

import os
import re
import sys
from pathlib import Path

import gpytorch
import pytest
import torch
from support import browser
from support.pages import Page
from support.programs import python
from typer.testing import CliRunner

import autokern
from autokern.cli import report
from autokern.cli.commands import app
from autokern.cli.report import without_paths
from autokern.core.decision import Cost, Decision
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system import host

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "calibration" / "hosts" / "amd-epyc.json"
GP = """
import os, sys, torch, gpytorch
os.chdir("/")
for n in (30, 60):
    gpytorch.kernels.RBFKernel()(torch.rand(n, 2)).to_dense()
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""


def decided(calls_of: str = "cdist", **changes) -> Decision:
    fields = {
        "problem": Problem(op="kernel_matrix", m=50, n=50, d=2, variant="rbf/same/iso"), "candidate": calls_of,
        "reason": "predicted <fast> in /opt/secret/folder", "source": "measured", "margin": 2.0, "uncertainty": 0.1,
        "predicted": {"cdist": 1e-3, "stock": 2e-3}, "excluded": {"keops": "no compiler in /opt/gcc"},
        "costs": {name: Cost(seconds=seconds, memory=2**20) for name, seconds in (("cdist", 1e-3), ("stock", 2e-3))},
    }  # fmt: skip
    return Decision(**fields | changes)


def _calls() -> None:
    """Let this process have run a program: a session with measurements of a real machine, and some calls."""
    dispatch.reset()
    for n in (20, 40, 40, 80):
        x = torch.rand(n, 3, dtype=torch.float64)
        autokern.covariance.matrix(gpytorch.kernels.RBFKernel().double().requires_grad_(False), x)
        autokern.linalg.qr(torch.rand(10 * n, n, dtype=torch.float64))


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setenv("AUTOKERN_PROFILE", str(RECORDED))
    _calls()


def made(page: dict, folder: Path) -> tuple[str, Page]:
    report.write(folder / "page.html", page)
    text = (folder / "page.html").read_text()
    return text, Page(text)


def test_what_calls_saved_follows_from_their_decisions():
    found = report.gain([(decided(), 10)])
    assert found.saved == pytest.approx(0.01)
    assert report.gain([(decided("stock", margin=1.0, uncertainty=0.0), 5)]).saved == 0.0
    assert str(report.gain([(decided(predicted={}), 5)])) == "not measured"
    slower = decided(margin=0.5), 2
    assert str(report.gain([slower])) == "−1.00 ms"
    assert str(report.gain([(decided(), 10), slower])) == "9.00 ms"


@pytest.mark.usefixtures("served")
def test_the_page_of_a_program_says_what_was_saved_and_why(tmp_path, monkeypatch):
    monkeypatch.setitem(dispatch.session().past, ("optimised function", "replay"), 1234)
    text, found = made(report.of_program("/a/b/train.py", 12.3, 2.5), tmp_path)
    assert "1,234 evaluations of losses and acquisition functions were replayed" in str(autokern.explain())
    words = " ".join(found.text.split())
    for part in (
        "train.py", "12.3 s", "of which 2.50 s until its first call of a model",
        "1,234 evaluations of losses and", "saved, predicted",
        "predicted from measured times, not measured on this run",
        "What ran, and why", "Saved by key", "Host",
        "kernel_matrix(m=40, n=40, d=3", "predicted to be the fastest", host.cpu_model(),
    ):  # fmt: skip
        assert part in words, part
    assert "<code>autokern compare</code>" in text
    assert str(report.gain(dispatch.decisions())) in words
    assert len(text) < 300_000
    _is_alone(text, found)


def _is_alone(text: str, found: Page) -> None:
    """Assert that a page needs nothing beside it and tells no place on this machine."""
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert all(address.startswith("#") for address in found.addresses)
    assert not re.search("https?://", text)
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(set(found.ids)) == len(found.ids)
    for place in (str(ROOT), str(Path.home()) + "/", os.environ["AUTOKERN_HOME"], sys.prefix):
        assert place not in text


def test_text_is_escaped_and_paths_are_left_out(tmp_path, monkeypatch):
    alone = decided("stock", predicted={}, source="only choice")
    rows = [(decided(), 3), (decided(predicted={}, source="unmeasured"), 2), (alone, 7)]
    monkeypatch.setattr(dispatch, "decisions", lambda: rows)
    text, found = made(report.of_program("<b>&train.py", 1.0), tmp_path)
    assert "<b>&train.py" in found.text
    assert "b" not in found.tags[: found.tags.index("h1")]
    assert "predicted <fast> in …" in found.text
    assert "cannot: no compiler in …" in found.text
    assert "/opt" not in text
    assert "2 calls are of keys of which nothing is measured" in found.text
    assert found.text.count("no choice") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("matern52/same/ard with theta/x", "matern52/same/ard with theta/x"),
        ("in ~/cache/a.so, not there", "in …, not there"),
        (r"C:\Users\me\x.dll fails", "… fails"),
        ("file '/a/b c/d'", "file '… c/d'"),
        ("1/2 and 3 / 4", "1/2 and 3 / 4"),
    ],
)
def test_paths_are_told_from_words(text, told):
    assert without_paths(text) == told


def _run(folder: Path, end: str, *, report: str = "out.html", **environment: str):
    (folder / "pro gram.py").write_text(GP + end)
    words = ("-m", "autokern", "run", "--report", report, "pro gram.py")
    return python(*words, cwd=folder, AUTOKERN_PROFILE=str(RECORDED), **environment)


ENDS = {"raise ValueError('theirs')": 1, "sys.exit(7)": 7, "": 0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the program forks")
@pytest.mark.parametrize("end", [next(iter(ENDS)), *(pytest.param(e, marks=pytest.mark.slow) for e in [*ENDS][1:])])
def test_a_program_ends_as_ever_and_leaves_its_report(tmp_path, end):
    done = _run(tmp_path, end)
    assert done.returncode == ENDS[end], done.stderr
    assert ("ValueError: theirs" in done.stderr) == ("raise" in end)
    assert done.stderr.count("the report is in") == 1
    text = (tmp_path / "out.html").read_text()
    found = Page(text)
    assert "pro gram.py" in found.text
    assert "kernel_matrix(m=60, n=60, d=2" in found.text
    _is_alone(text, found)


@pytest.mark.slow
def test_a_folder_that_goes_meanwhile_leaves_the_status_alone(tmp_path):
    (tmp_path / "there").mkdir()
    end = f"import shutil; shutil.rmtree({str(tmp_path / 'there')!r}); sys.exit(3)"
    done = _run(tmp_path, end, report="there/o.html")
    assert done.returncode == 3
    assert "no report was written" in done.stderr


@pytest.mark.slow
def test_of_ranks_the_first_one_writes(tmp_path):
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "AUTOKERN_RANKS": "off"}
    for rank in "10":
        done = _run(tmp_path, "", RANK=rank, LOCAL_RANK=rank, **job)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.html").exists() == (rank == "0")


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("command", [["show"], ["show", "qr"], ["show", "qr", "--json"]])
def test_show_writes_a_page(run, tmp_path, command):
    result = run(*command, "--html", tmp_path / "out.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out.html").read_text()
    found = Page(text)
    words = " ".join(found.text.split())
    assert ("qr on cpu in float64" in words) == ("choices by the number of columns" in words) == (command[1:] != [])
    _is_alone(text, found)


# In a real browser: sizes that are not zero, no request, no complaint, no scrolling sideways.


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.installed() is None:
        pytest.skip(f"no Chromium is installed ({', '.join(browser.NAMES)})")
    shown = browser.Browser(tmp_path_factory.mktemp("browser"))
    yield shown
    shown.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of both kinds, made from what a machine has recorded."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOKERN_PROFILE", str(RECORDED))
        _calls()
        report.write(folder / "run.html", report.of_program("a" * 90 + ".py", 3.0))
        assert CliRunner().invoke(app, ["show", "--html", str(folder / "show.html")]).exit_code == 0
    dispatch.reset()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ["run", "show"])
def test_a_browser_shows_it(chromium, pages, name, width, scheme):
    file = pages / f"{name}.html"
    chromium.open(file, width, scheme)
    if "REPORT_SCREENSHOTS" in os.environ:
        chromium.screenshot(Path(os.environ["REPORT_SCREENSHOTS"], f"{name}-{width}-{scheme}.png"))
    assert chromium.requests() == [file.as_uri()]
    assert chromium.complaints() == []
    assert chromium.value("document.documentElement.scrollWidth") <= width
    text = chromium.value("document.body.innerText")
    assert {"run": "What ran, and why", "show": "Fastest candidates"}[name] in text
    ink, paper = (
        chromium.value(f"getComputedStyle(document.body).{what}").removeprefix("rgb(").split(",")[0]
        for what in ("color", "backgroundColor")
    )
    assert (int(ink) < int(paper)) == (scheme == "light")
