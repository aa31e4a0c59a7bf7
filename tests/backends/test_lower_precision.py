"""Lower precision: admitted by measured errors, checked again on the caller's data; and the arithmetic of it."""

import warnings

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from support.tiling import random

import autokern
from autokern.cli import summary
from autokern.core.decision import Decision
from autokern.core.errors import AutokernWarning
from autokern.core.problem import Feasibility, Features, Problem
from autokern.core.settings import Settings
from autokern.core.state import inside
from autokern.kernels import tiles
from autokern.kernels import tree as trees
from autokern.ops.kernel_matmul import in_lower_precision
from autokern.runtime import dispatch, review
from autokern.runtime.memo import NEVER, Entry
from autokern.tuning import measuring as accuracy
from autokern.tuning.calibration import calibrate
from autokern.tuning.chooser import Chooser, fitted
from autokern.tuning.measuring import Trialled
from autokern.tuning.policy import decide, described
from autokern.tuning.profile import Profile, Timing, Trial

pytestmark = pytest.mark.usefixtures("one_thread")
NEVER_MEASURED = Settings(calibrate="never")
ROUGHLY = Settings(calibrate="never", accuracy="approximate")
SMALL = Problem(op="double", m=4, n=4)
KERNEL_MATMUL_CALL = dispatch.route("kernel_matmul")


@pytest.fixture
def op(make_op):
    """An op that doubles a matrix, exactly or with an error that the test says."""
    made = make_op("double", features=lambda p: Features(calls=1, flops=float(p.m * p.n)), memory=lambda p: 2**20)
    made.error = 1e-4
    made.runs = []

    def rough(a):
        made.runs.append("rough")
        return 2 * a * (1 + made.error)

    def other(a):
        made.runs.append("other")
        return a + a

    made.candidate("stock")(lambda a: made.runs.append("stock") or 2 * a)
    made.candidate("other")(other)
    made.candidate("rough", accuracy="approximate", memory=lambda p: 2**10)(rough)
    return made


def profile(error: float | None = 1e-4, sizes=(2, 4, 8), **more: object) -> Profile:
    """Timings by which `rough` is the fastest and `other` the next."""
    trials = []
    for n in sizes:
        timings = {"stock": Timing(1e-3), "other": Timing(5e-4, 0.5)}
        timings["rough"] = Timing(1e-4, 0.1, relative_error=error)
        trials.append(Trial(Problem(op="double", m=n, n=n, **more), timings))
    return fitted(Profile(trials=trials))


def chosen(op, settings, known=None, problem=None):
    chooser = Chooser(known or profile())
    return described(decide(Feasibility(op, problem or SMALL), chooser, settings), chooser, settings)


FORCED = (("double", "rough"),)
STRICT = Settings(accuracy="approximate", max_error=1e-5)


@pytest.mark.parametrize(("settings", "measured", "candidate", "why"), [
    (Settings(), 1e-4, "other", ""), (ROUGHLY, 1e-4, "rough", ""),
    (STRICT, 1e-4, "other", "its error was measured to be 1e-04, and at most 1e-05 is allowed"),
    (ROUGHLY, None, "other", "not measured on this machine: autokern calibrate --accuracy approximate"),
    (Settings(force=FORCED), 1e-4, "stock", ""), (Settings(force=FORCED, accuracy="approximate"), None, "rough", ""),
])  # fmt: skip
def test_it_serves_by_order_only_and_where_its_measured_error_is_small_enough(op, settings, measured, candidate, why):
    found = chosen(op, settings, profile(measured))
    assert found.candidate == candidate
    assert why in found.excluded.get("rough", "")
    assert chosen(op, settings, profile(measured), SMALL.replace(m=2000, n=2000)).candidate != "rough" or settings.force


def test_explain_sets_time_throughput_memory_and_error_side_by_side(op):
    def rows(decision):
        return {line.replace("→", " ").split()[0]: line.replace("→", " ").split() for line in str(decision).split("\n")}

    found = rows(chosen(op, ROUGHLY))
    assert found["latency"] == ["latency", "throughput", "memory", "error"]
    assert found["rough"][1:3] == ["100", "µs"]
    assert found["rough"][4:] == ["Gflop/s", "1", "KiB", "1e-04"]
    assert found["other"][6:] == ["MiB", "in", "bound"] or found["other"][5:] == ["1", "MiB", "in", "bound"]
    refused = str(chosen(op, STRICT))
    assert "100 µs" in refused, "what is too rough is told of beside the others"
    assert "cannot: its error was measured to be 1e-04" in refused


def test_errors_are_measured_only_when_asked_for(op):
    known = calibrate([op], "quick", 2.0, ["cpu"], Profile(), dtypes=["float64"])
    assert all("rough" not in t.timings for t in known.trials)
    found = calibrate([op], "quick", 2.0, ["cpu"], known, dtypes=["float64"], accuracy="approximate")
    measured = [t.timings["rough"].relative_error for t in found.trials if "rough" in t.timings]
    assert len(measured) >= len(op.grid("quick", "float64", "cpu"))
    assert found.banned == []
    assert all(error == pytest.approx(1e-4, rel=1e-6) for error in measured)
    others = [t.timings["other"] for t in found.trials if "other" in t.timings]
    assert others
    assert all(timing.relative_error is None for timing in others)
    later = found.merge(calibrate([op], "quick", 2.0, ["cpu"], found, dtypes=["float64"]))
    assert all(t.timings["rough"].relative_error for t in later.trials if "rough" in t.timings), "nothing is forgotten"


def test_an_error_that_is_no_number_is_as_bad_as_any(op):
    nan = Trialled(torch.tensor([1.0, float("nan")]), ())
    assert accuracy.relative_error(op, nan, Trialled(torch.ones(2), ())) == accuracy.HOPELESS
    assert accuracy.gap([torch.empty(0, 3)], [torch.empty(0, 3)]) == 0.0
    assert accuracy.gap([torch.zeros(2)], [torch.zeros(2)]) == 0.0


def summarised(timings):
    """The line of the summary of problems with these timings by candidates."""
    problem = Problem(op="exact_log_prob", m=10, n=10, grad="theta", variant="rbf/cholesky")
    found = Profile(trials=[Trial(problem.replace(d=k), of) for k, of in enumerate(timings, 1)])
    (line,) = summary.summaries(found, summary.winners(found))
    return line, {winner.candidate for winner in summary.winners(found)}


def test_lower_precision_is_not_among_the_fastest():
    timings = {"stock": Timing(1e-3), "cpu": Timing(5e-4, 0.5), "rough": Timing(1e-4, 0.1, relative_error=1e-5)}
    line, winners = summarised([timings] * 2)
    assert (line.fastest, line.speedup, winners) == ("cpu", pytest.approx(2.0), {"cpu"})


def test_the_fastest_candidates_are_counted_where_none_always_wins():
    """Few candidates serve all problems of densities: counted over those alone, stock seemed to be the fastest."""
    names = ["fused", "stock", "fused", "arrays", "fused", "state-space", "matrix-free", "arrays"]
    timings = [{name: Timing(5e-4, 0.5), "stock": Timing(1e-3)} for name in names]
    line, _ = summarised(timings)
    assert line.won == {"fused": 3, "arrays": 2, "matrix-free": 1, "state-space": 1, "stock": 1}
    assert line.fastest == "fused (3 of 8), arrays (2), matrix-free (1), state-space (1), 1 more"
    for ratio, fastest in ((0.5, "cpu"), (0.96, "cpu"), (0.98, "stock")):  # a tie is stock's
        assert summarised([{"stock": Timing(1e-3), "cpu": Timing(1e-3, ratio)}])[0].fastest == fastest


TWICE = "rough+other+rough"
CHECKED = [TWICE, TWICE, "rough", TWICE, *["rough"] * 3, TWICE, "rough"]


def served(op, times: int) -> list[str]:
    """Return what ran for so many calls."""
    call, found, a = dispatch.route(op), [], random(4, 4)
    for _ in range(times):
        op.runs.clear()
        call(a)
        found.append("+".join(op.runs))
    return found


def test_where_it_errs_more_on_the_callers_data_it_gives_way(op):
    dispatch.reset(ROUGHLY).adopt(profile())
    assert served(op, 5)[-1] == "rough"
    op.error = 2e-3
    with pytest.warns(
        AutokernWarning, match=r"rough errs by 2e-03 on these data, and at most 1e-03 is allowed"
    ) as told:
        found = served(op, 40)
    assert len(told) == 1
    assert found[:3] == ["rough", "rough", "rough+other+other"]
    assert set(found[3:]) == {"other"}
    ((decision, calls),) = dispatch.decisions()
    assert (decision.candidate, calls) == ("other", 45)
    assert "errs by 2e-03" in decision.reason
    op.error = 1e-4
    with autokern.using(max_error=1e-2), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served(op, 3)[0] == "rough+other+rough", "another order is another decision"


def test_blocks_in_a_loop_are_checked_as_one_and_what_has_failed_stays_out(op):
    dispatch.reset(NEVER_MEASURED).adopt(profile())

    def block(times=1, **orders):
        with autokern.using(accuracy="approximate", **orders):
            return served(op, times)

    assert [ran for _ in range(9) for ran in block()] == CHECKED
    dispatch.reset(NEVER_MEASURED).adopt(profile())
    op.error = 2e-3
    with pytest.warns(AutokernWarning, match="rough errs by 2e-03"):
        assert block(2) == ["rough+other+other", "other"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [block() for _ in range(3)] == [["other"]] * 3
        assert block(max_error=1e-2)[0].endswith("rough"), "another order is another decision"


def test_a_check_leaves_the_callers_graph_and_random_numbers_alone():
    x = random(40, 3).requires_grad_()
    features = (x**2).exp()  # keeps what its backward pass needs
    kernel, mean = RBFKernel().double(), (features**2).sum(-1)  # one argument that depends on another

    def loss():
        return (KERNEL_MATMUL_CALL(kernel, features, features, mean.unsqueeze(-1)) ** 2).sum()

    expected = torch.autograd.grad(loss(), x, retain_graph=True)[0]
    state = torch.get_rng_state()
    with autokern.using(force={"kernel_matmul": "float32"}, accuracy="approximate"):
        found = torch.autograd.grad(loss(), x)[0]
    assert torch.get_rng_state().equal(state)
    assert accuracy.gap([found], [expected]) < 1e-4
    assert autokern.stats()["kernel_matmul"]["float32"] == 1


def test_of_two_checks_at_once_one_speaks(op, monkeypatch):
    decision = Decision(problem=SMALL, candidate="rough", reason="", source="order", order=("rough", "other"))
    entry = Entry(decision, op)
    monkeypatch.setattr(review, "_error", lambda *a: entry.serve(op["other"]) or 0.5)  # another was faster
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        review.check(entry, (random(4, 4),), ROUGHLY)
    assert (entry.candidate.name, entry.due) == ("other", NEVER)


def test_what_is_measured_inside_of_a_calibration_is_measured_for_everybody(op):
    dispatch.reset(ROUGHLY).adopt(profile())
    inside.measuring = True
    try:
        assert served(op, 1) == ["other"]
    finally:
        inside.measuring = False


def test_quick_measurements_of_errors_replace_nothing_that_was_known(op):
    known = profile(error=None)
    problem = known.trials[0].problem
    found = known.merge(calibrate([op], "quick", 2.0, ["cpu"], known, dtypes=["float64"], accuracy="approximate"))
    (trial,) = [t for t in found.trials if t.problem == problem]
    assert trial.timings["stock"] == Timing(1e-3)
    assert trial.timings["other"] == Timing(5e-4, 0.5)


@pytest.fixture
def widened(monkeypatch):
    """The CPU multiplies what is rounded already, and adds in float32 as tensor cores do."""
    monkeypatch.setattr(tiles, "distances", lambda a, b, out: torch.mm(a.to(out.dtype), b.mT.to(out.dtype), out=out))


@pytest.mark.parametrize(("precision", "digits"), [("float16", 11), ("bfloat16", 8)])
@pytest.mark.parametrize("kernel", [RBFKernel(), MaternKernel(1.5)])
def test_only_inner_products_are_rounded(widened, precision, digits, kernel):
    x, y = 3 + random(70, 20).float(), 3 + random(50, 20, seed=1).float()
    kernel = kernel.float()
    kernel.lengthscale = 20**0.5
    rhs = random(50, 4, seed=2).float()
    found = in_lower_precision(kernel, x, y, rhs, precision)
    tree = trees.read(kernel.double(), x.double())
    exact = trees.dense(tree, trees.read(kernel, y.double()).points) @ rhs.double()
    kernel.float()
    error = accuracy.gap([found], [exact])
    assert error < 4 * 2.0**-digits
    assert error > 2.0**-digits / 100, "nothing was rounded"


def test_far_points_are_clamped_whatever_the_rounding_of_the_precision(widened):
    x = random(30, 40).float() * 3
    assert in_lower_precision(RBFKernel().float(), x, x, torch.ones(30, 1), "bfloat16").max() < 1.5


def test_where_float16_has_no_room_points_are_not_rounded(widened):
    x = torch.linspace(0, 800, 40).unsqueeze(-1)
    tree = trees.read(RBFKernel().float().requires_grad_(False), x / 0.6931)
    assert not tiles.has_room("float16", -0.5, tree.points[0] - tree.points[0].mean())
    assert tiles.has_room("bfloat16", -0.5, tree.points[0])
    assert tiles.has_room("float16", -0.5, random(9, 3).float())
    assert tiles.sides(tree, None, precision="float16").leaves[0].rows.dtype is torch.float32
    found = in_lower_precision(RBFKernel().float(), x, x, torch.ones(40, 1), "float16")
    assert found.isfinite().all()
