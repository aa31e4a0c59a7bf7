"""Notebooks: what a last line shows is small HTML, and results become data frames."""

import sys

import pytest
import torch
from gpytorch.kernels import RBFKernel
from support.models import ExactModel
from support.pages import Page
from support.synthetic import square, trials

import autokern
from autokern.core.decision import Decision
from autokern.core.errors import AutokernError
from autokern.core.problem import Problem
from autokern.tuning.profile import Ban, Profile


def profile() -> Profile:
    found = [trials({"choleskyqr2": 0.5}, range(10, 300), op="qr", tall=10, batch=batch) for batch in (1, 3)]
    banned = [Ban("qr", "cpu", "float32", "cpu", "a < b & c")]
    return Profile(fingerprint="ab" * 16, trials=[*found[0], *found[1]], banned=banned)


def explanation() -> autokern.Explanation:
    for n in range(3, 60):
        autokern.linalg.qr(torch.randn(2 * n, n, dtype=torch.float64))
    return autokern.explain()


@pytest.mark.parametrize("make", [profile, explanation, lambda: autokern.explain("qr", n=50)])
def test_the_html_is_well_formed_and_small(make):
    text = make()._repr_html_()
    found = Page(text)
    assert len({len(row) for row in found.rows}) == 1
    assert 1 < len(found.rows) <= 41
    assert len(text) < 20_000
    assert "<script" not in text
    assert "qr" in found.text
    assert ("a < b & c" in found.text) == (make is profile)


def test_what_serves_a_model_is_a_table():
    x = torch.rand(30, 2)
    made = autokern.explain(ExactModel(x, x.sum(-1), RBFKernel()))
    found = Page(made._repr_html_())
    assert [row[0] for row in found.rows] == ["part", "training step", "prediction", "acquisition"]
    assert "ExactModel: 30 points" in found.text
    assert made.to_frame().part.tolist() == ["training step", "prediction", "acquisition"]


def test_a_table_without_rows_is_its_title():
    for empty, told in ((Profile(), "nothing measured"), (autokern.Explanation([]), "took no decision")):
        found = Page(empty._repr_html_())
        assert told in found.text
        assert found.rows == []


def test_decisions_are_told_by_op_candidate_and_reason():
    found = explanation()
    assert len(found.decisions) == 57
    text = Page(found._repr_html_()).text
    for told in ("qr by stock", "m 6–118, n 3–59, float64, cpu"):
        assert told in text
        assert told in str(found)
    assert max(map(len, str(found).splitlines())) <= 80


def test_a_factor_that_nobody_has_measured_is_a_dash():
    of = {"candidate": "arrays", "reason": "not measured here", "source": "unmeasured"}
    unknown = Decision(problem=square(60, "objective"), **of)
    known = Decision(problem=Problem(op="qr", m=60, n=6), candidate="x", reason="r", source="measured", margin=1.5)
    lines = str(autokern.Explanation([(unknown, 3), (known, 2)])).splitlines()
    assert [line.split()[:2] for line in lines[1::2]] == [["3", "–"], ["2", "1.50"]]
    unread = Decision(problem=Problem(op="qr"), candidate="stock", reason="not served", source="only choice")
    assert str(autokern.Explanation([(unread, 3)])).splitlines()[1].endswith("qr by stock"), "no sizes are invented"


def test_a_last_line_on_a_terminal_is_short():
    assert repr(profile()) == "Profile(580 problems of 1 ops, host abababab)"
    assert repr(Profile()) == "Profile(nothing measured)"
    found = explanation()
    assert repr(found) == str(found)


def test_frames():
    found = profile().to_frame()
    assert (len(found), set(found.candidate)) == (1160, {"stock", "choleskyqr2"})
    assert found[found.candidate == "choleskyqr2"].speedup.unique().tolist() == [2.0]
    found = explanation().to_frame()
    assert (len(found), found.calls.sum()) == (57, 57)
    decision = autokern.explain("qr", n=50)
    found = decision.to_frame()
    assert found[found.runs].candidate.tolist() == ["stock"]
    assert set(found.candidate) == {"stock", *decision.excluded, *decision.costs}


def test_pandas_is_named_where_it_is_not_installed(monkeypatch):
    found = explanation()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(AutokernError, match="pip install pandas"):
        found.to_frame()
