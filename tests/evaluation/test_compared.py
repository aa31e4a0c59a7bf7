"""What serves a model, a function and a cell is told and compared; notebooks show it as small HTML, and frames."""

import logging
import sys

import gpytorch
import pytest
import torch
from gpytorch.kernels import InducingPointKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.variational import IndependentMultitaskVariationalStrategy, VariationalStrategy
from support.losses import Own, single, sparse
from support.models import ExactModel
from support.pages import Page
from support.synthetic import square, trials

import autokern
from autokern.core import errors
from autokern.core.decision import Decision
from autokern.core.errors import AutokernError
from autokern.core.problem import Problem
from autokern.evaluation import compared
from autokern.tuning.profile import Ban, Profile


def test_a_function_runs_without_and_with_autokern_in_turn():
    seen = []

    def run():
        seen.append(autokern.is_enabled())
        mll = single(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
        return mll(mll.model(*mll.model.train_inputs), mll.model.train_targets), [1.0, "text"]

    found = autokern.compare(run, rounds=2)
    assert sorted(seen) == [False] * 3 + [True] * 3
    assert len(found.off) == len(found.on) == 2
    assert 0 <= found.difference < 1e-12
    assert not autokern.is_enabled()


@pytest.mark.parametrize(
    ("off", "on", "difference", "told"),
    [
        (2.0, 1.0, 1e-9, "2.00 times as fast: 2.00 s by the library, 1.00 s by autokern; results agree within 1e-09"),
        (1.0, 2.0, 0.0, "2.00 times as slow: 1.00 s by the library, 2.00 s by autokern; results are the same"),
        (1.0, 1.0, None, "1.00 times as fast: 1.00 s by the library, 1.00 s by autokern"),
    ],
)
def test_the_sentence(off, on, difference, told):
    assert str(autokern.Compared([off], [on], difference)) == told
    busy = autokern.Compared([off], [on], difference, "others use 1.9 of 2 cores")
    assert str(busy) == f"{told}; meanwhile others use 1.9 of 2 cores: times are of a busy machine"


def test_results_without_numbers_or_of_other_shapes_have_no_difference():
    assert autokern.compare(lambda: None, rounds=1).difference is None
    assert "agree" not in str(autokern.compare(lambda: None, rounds=1))
    kinds = iter(range(9))
    assert autokern.compare(lambda: torch.zeros(next(kinds)), rounds=1).difference is None


def test_what_cannot_be_compared_says_so(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        autokern.compare(lambda: 1 / 0)
    assert not autokern.is_enabled()
    monkeypatch.setenv("AUTOKERN", "0")
    with pytest.raises(autokern.SettingsError, match="AUTOKERN=0"):
        autokern.compare(lambda: None)


def test_where_it_is_enabled_already_it_is_off_for_the_librarys_turns_only():
    seen = []
    import autokern.auto as first

    autokern.enable()
    try:
        autokern.compare(lambda: seen.append(autokern.is_enabled()), rounds=1)
        with pytest.raises(ZeroDivisionError):
            autokern.compare(lambda: 1 / 0)
        assert sorted(seen) == [False, False, True, True]
        assert autokern.is_enabled()
        import autokern.auto as second

        assert second is first, "importing it again does not enable once more"
    finally:
        autokern.disable()
        assert autokern.is_enabled(), "it was enabled twice"
        autokern.disable()
    assert not autokern.is_enabled()


@pytest.mark.parametrize(("short", "runs"), [(10.0, [False, True, False, True]), (0.0, [False, True])])
def test_a_cell_runs_each_way_and_leaves_the_names_of_the_last_run(capsys, monkeypatch, short, runs):
    monkeypatch.setattr(compared, "_SHORT", short)

    class Shell:
        def __init__(self):
            self.user_ns = {"count": [], "autokern": autokern}

        def register_magic_function(self, function, kind, name):
            assert (kind, name) == ("cell", "autokern")
            self.magic = function

    shell = Shell()
    autokern.load_ipython_extension(shell)
    shell.magic("", "count.append(autokern.is_enabled())\nlast = len(count)")
    assert shell.user_ns["count"] == runs
    assert shell.user_ns["last"] == len(runs)
    assert "by the library" in capsys.readouterr().out


def rows(model):
    return {part: (by, why) for part, by, why in autokern.explain(model).rows}


def test_a_model_that_is_read_is_served_and_left_as_it_was():
    mll = single(ScaleKernel(RBFKernel()))
    before = [p.clone() for p in mll.parameters()]
    found = rows(mll.model)
    assert found["training step"] == ("objective by arrays", "")
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(mll.parameters(), before, strict=True))
    assert mll.model.prediction_strategy is None
    assert not autokern.is_enabled()


def test_a_kernel_of_your_own_is_named_with_the_kernels_that_are_read():
    why = rows(single().model)["training step"][1]
    assert "not read: a kernel Own (read are" in why
    assert "in long loops it is recorded and replayed" in why
    for part in ("prediction", "acquisition"):
        assert "a class or function of your own (Own)" in rows(single().model)[part][1]
    lines = str(autokern.explain(single().model)).splitlines()
    assert lines[0] == "Model: 12 points, float64, cpu"
    assert max(map(len, lines)) <= 80


def test_a_kernel_of_the_library_that_keeps_state_is_not_said_to_be_your_own():
    x = torch.rand(200, 2, dtype=torch.float64)
    model = ExactModel(x, x.sum(-1), InducingPointKernel(RBFKernel(), x[:5].clone(), GaussianLikelihood())).double()
    for part in ("prediction", "acquisition"):
        assert "not read: the library's InducingPointKernel, which keeps or draws" in rows(model)[part][1]


def test_what_cannot_be_replayed_says_why():
    class Counting(Own):
        calls = 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            return super().forward(*args, **kwargs)

    why = rows(single(ScaleKernel(Counting())).model)["training step"][1]
    assert "Counting.forward, a function of your own, may change what others see" in why


def tasks(*args, **kwargs):
    return IndependentMultitaskVariationalStrategy(VariationalStrategy(*args, **kwargs), num_tasks=2)


def test_lists_and_variational_models():
    models = [single(ScaleKernel(RBFKernel())).model, single().model]
    several = gpytorch.models.IndependentModelList(*models)
    assert {"1, training step", "2, training step", "2, prediction"} <= rows(several).keys()

    for strategy in (VariationalStrategy, tasks):
        found = rows(sparse(strategy=strategy).model)
        assert found["training step"] == ("the library", "in long loops it is recorded and replayed")
        assert found["prediction"] == ("the library", "")


def test_other_modules_and_an_environment_that_switches_off(monkeypatch):
    with pytest.raises(autokern.SettingsError, match="a Linear was asked for; explain takes"):
        autokern.explain(torch.nn.Linear(2, 2))
    monkeypatch.setenv("AUTOKERN", "0")
    with pytest.raises(autokern.SettingsError, match="AUTOKERN=0"):
        autokern.explain(single().model)


def test_a_reason_is_said_once(monkeypatch):
    said, log = [], logging.getLogger("autokern")
    monkeypatch.setattr(log, "handle", lambda record: said.append(record.getMessage()))
    log.setLevel(logging.INFO)
    errors._said.clear()
    try:
        with autokern.enabled():
            for _ in range(3):
                mll = single()
                mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)
    finally:
        log.setLevel(logging.NOTSET)
    named = [line for line in said if "a kernel Own" in line]
    assert named
    assert len(named) == len(set(named))


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
