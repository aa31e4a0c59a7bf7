"""policy.py on synthetic profiles: made-up timings whose right answer is known."""

from __future__ import annotations

import msgspec
import pytest
from support.bases import fit_base
from support.synthetic import square, with_candidates

from autokern.core.decision import Decision
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.core.problem import Feasibility, Features, Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.system.memory import Limit
from autokern.tuning.chooser import Chooser, fitted
from autokern.tuning.forest import NOISE
from autokern.tuning.policy import decide, described
from autokern.tuning.profile import Ban, Kept, Profile, Timing, Trial

ORDERS_NOTHING = Settings()
SIZES = (16, 32, 64, 128, 256, 512, 1024)


@pytest.fixture
def op(make_op):
    return with_candidates(make_op)


def by_threads(make_op, **threads: int):
    op = make_op("synthetic", features=lambda p: Features(calls=1, flops=float(p.m * p.n * p.n)))
    for name, count in {"stock": 0, "fast": 0, **threads}.items():
        op.candidate(name, threads=count)(lambda a: a)
    return op


def seconds_of_stock(n: int) -> float:
    return 1e-6 + 1e-11 * n**3


def profile(ratios, sizes=SIZES, error: float = 1e-4, **more: object) -> Profile:
    """Timings by name: a number, or a function of the size; stock takes a microsecond and 1e-11 seconds per flop."""
    trials = []
    for n in sizes:
        stock = seconds_of_stock(n)
        timings = {"stock": Timing(stock)}
        for name, ratio in ratios.items():
            r = ratio(n) if callable(ratio) else ratio
            timings[name] = Timing(stock * r, r, 0.005, 5, relative_error=error if name == "sloppy" else None)
        trials.append(Trial(square(n, **more), timings))
    return fitted(Profile(trials=trials))


def chooser(ratios, **more) -> Chooser:
    return Chooser(profile(ratios, **more), {})


def chosen(op, ratios, problem, orders=ORDERS_NOTHING, there=None, **more) -> Decision:
    return decide(Feasibility(op, problem), chooser(ratios, **more), orders, there)


def test_the_fastest_wins(op):
    found = chosen(op, {"fast": 0.7, "other": 0.5, "exact": 0.9}, square(64))
    assert (found.candidate, found.source) == ("other", "measured")
    assert found.reason == "predicted to be the fastest, by more than the uncertainty"
    assert found.margin == pytest.approx(2.0, rel=0.02)
    assert found.order[:4] == ("other", "fast", "exact", "stock")


@pytest.mark.parametrize("ratio", [1.0, 0.99, 1 / (1 + NOISE) + 0.01, 1.5])
def test_stock_wins_ties(op, ratio):
    found = chosen(op, {"fast": ratio}, square(64))
    assert (found.candidate, found.margin) == ("stock", 1.0)
    assert found.reason == "no other candidate is faster by more than the uncertainty"


@pytest.mark.parametrize(
    ("all_threads", "one", "winner"),
    [
        (0.5, 0.5, "fast@1"),
        (0.5, 0.52, "fast@1"),
        (0.5, 0.8, "fast"),
        (0.9, 0.3, "fast@1"),
        (1.0, 0.98, "fast@1"),
        (1.0, 1.02, "stock"),
    ],
)
def test_of_near_ties_one_thread_runs(make_op, all_threads, one, winner):
    op = by_threads(make_op, **{"fast@1": 1})
    found = chosen(op, {"fast": all_threads, "fast@1": one}, square(64))
    assert found.candidate == winner
    assert ("with fewer threads" in found.reason) == (winner == "fast@1" and one > 0.3)
    assert sorted(found.order) == sorted(op.names())


@pytest.mark.parametrize(("ratio", "winner"), [(0.8, "exact"), (1.0, "exact"), (1.05, "exact"), (1.2, "stock")])
def test_an_exact_result_may_cost_a_little_where_stock_approximates(make_op, ratio, winner):
    loose = with_candidates(make_op, approximates=lambda problem: True)
    assert chosen(loose, {"exact": ratio, "fast": 1.0}, square(64)).candidate == winner
    assert chosen(loose, {"exact": 1.4, "fast": ratio}, square(64)).candidate == ("fast" if ratio < 0.9 else "stock")


def test_fewer_threads_are_no_reason_on_an_accelerator(make_op):
    op = by_threads(make_op, arrays=1)
    known = fitted(profile({"fast": 0.51, "arrays": 0.5}, device="cuda"))
    found = decide(Feasibility(op, square(64, device="cuda")), Chooser(known, {}), ORDERS_NOTHING)
    assert found.candidate == "arrays"
    assert "threads" not in found.reason


def with_default(make_op, **options):
    return with_candidates(make_op, default_candidate=lambda problem: "fast", **options)


def test_a_default_candidate_runs_while_nothing_is_measured(make_op):
    op = with_default(make_op)
    found = decide(Feasibility(op, square(64)), Chooser(Profile(), {}), ORDERS_NOTHING)
    assert (found.candidate, found.source) == ("fast", "unmeasured")
    assert "stock would do far more work" in found.reason
    far = chosen(op, {"fast": 1.5}, square(2**14), sizes=(16, 32))
    assert (far.candidate, far.source) == ("fast", "unmeasured"), "measurements do not reach so far"
    banned = Profile(banned=[Ban("synthetic", "fast", "float64", "cpu", "x")])
    assert decide(Feasibility(op, square(64)), Chooser(banned, {}), ORDERS_NOTHING).candidate == "stock"


@pytest.mark.parametrize(("ratio", "winner"), [(0.8, "fast"), (0.96, "stock"), (1.5, "stock")])
def test_a_default_candidate_that_is_measured_must_be_faster(make_op, ratio, winner):
    assert chosen(with_default(make_op), {"fast": ratio}, square(64)).candidate == winner


def examined(op, instead: str, ratios, shipped=None) -> list[str]:
    """What serves problems below, within and above the sizes at which the exam keeps other choices."""
    known = profile(ratios)
    known.kept.append(Kept("synthetic", "float64", "cpu", "", False, 50, 100, instead))
    there = {} if shipped is None else {"synthetic@cpu": fit_base(op, [profile(shipped).trials])}
    return [decide(Feasibility(op, square(n)), Chooser(known, there), ORDERS_NOTHING).candidate for n in (32, 64, 128)]


def test_what_the_exam_kept_serves_at_those_sizes(op):
    assert examined(op, "stock", {"fast": 0.5}) == ["fast", "stock", "fast"]
    assert examined(op, "shipped", {"fast": 0.5}, {"other": 0.6}) == ["fast", "other", "fast"]
    assert examined(op, "shipped", {"fast": 0.5}) == ["fast", "stock", "fast"], "nothing is shipped"


def test_the_exam_makes_no_result_less_exact(make_op):
    """It compares times, at one size; stock's answer may be exact there, and loose at a size beside it."""
    loose = with_candidates(make_op, approximates=lambda problem: True, may_cost=lambda problem: 3.0)
    assert examined(loose, "stock", {"exact": 1.5, "fast": 0.5}) == ["exact", "exact", "exact"]


def test_force(op):
    found = chosen(op, {"fast": 0.5, "other": 2.0}, square(64), Settings(force=(("synthetic", "other"),)))
    assert (found.candidate, found.reason, found.source) == ("other", "forced by the user", "order")
    assert found.margin == pytest.approx(0.5, rel=0.02)
    assert found.order[:2] == ("other", "fast")
    unmeasured = decide(Feasibility(op, square(64)), Chooser(Profile(), {}), Settings(force=(("synthetic", "fast"),)))
    assert (unmeasured.candidate, unmeasured.source) == ("fast", "order")


def test_force_of_what_cannot_serve_means_stock_and_says_why(op):
    found = chosen(op, {"fast": 0.5}, square(64), Settings(force=(("synthetic", "tall-only"),)))
    assert (found.candidate, found.reason) == ("stock", "tall-only was forced but cannot serve: not tall")
    with pytest.raises(SettingsError, match="no candidate 'nonsense' to force; it has stock, fast"):
        chosen(op, {"fast": 0.5}, square(64), Settings(force=(("synthetic", "nonsense"),)))


@pytest.mark.parametrize("name", ["fast", "synthetic=fast"])
def test_exclude(op, name):
    found = chosen(op, {"fast": 0.5, "other": 0.7}, square(64), Settings(exclude=frozenset({name})))
    assert found.candidate == "other"
    assert found.excluded["fast"] == "excluded by the user"
    assert "fast" not in found.order
    assert chosen(op, {"fast": 0.5}, square(64), Settings(exclude=frozenset({"qr=fast"}))).candidate == "fast"


def test_thresholds_of_the_user_beat_measurements():
    qr, orders = get("qr"), Settings(threshold=(("qr", "cuda", 300),))
    for n, want in ((64, "stock"), (200, "cpu"), (300, "cpu"), (301, "stock"), (600, "stock")):
        found = decide(Feasibility(qr, Problem(op="qr", m=n, n=n, device="cuda")), Chooser(Profile(), {}), orders)
        assert found.candidate == want, n  # above: stock runs on the device; at 64 columns: on the CPU, as ordered
        assert "ordered by the user" in found.reason
    table = Feasibility(qr, Problem(op="qr", m=64, n=64, device="cuda"))
    native = decide(table, Chooser(Profile(), {}), Settings(threshold=(("qr", "cuda", 9),)))
    assert native.candidate == "native"


def test_random_choice_is_feasible_reproducible_and_various(op):
    known, table = chooser({"fast": 5.0}), Feasibility(op, square(64))
    draws = [[decide(table, known, Settings(random_seed=seed)).candidate for seed in range(40)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {"stock", "fast", "other", "exact"}
    sizes = {decide(Feasibility(op, square(n)), known, Settings(random_seed=1)).candidate for n in range(2, 60)}
    calls = {decide(table, known, Settings(random_seed=1), seen=seen).candidate for seen in range(60)}
    assert sizes == calls == {"stock", "fast", "other", "exact"}
    assert decide(table, known, Settings(random_seed=1), seen=7).review == 8, "each call is drawn anew"
    forced = [Settings(random_seed=seed, force=(("synthetic", "other"),)) for seed in range(9)]
    assert {decide(table, known, order).candidate for order in forced} == {"other"}


def test_memory(op):
    need = op["fast"].memory(square(64))
    ratios = {"fast": 0.5}
    assert chosen(op, ratios, square(64), Settings(memory=need)).candidate == "fast"
    assert chosen(op, ratios, square(64), there=Limit(need, "x")).candidate == "fast"
    op.candidate("frugal", memory=lambda p: need // 2)(lambda a: a)
    op.candidate("slow", memory=lambda p: need // 3, compiles=True)(lambda a: a)
    for orders, there in ((Settings(memory=need - 1), None), (ORDERS_NOTHING, Limit(need - 1, "x"))):
        found = chosen(op, ratios, square(64), orders, there)
        assert found.candidate == found.order[0] == "frugal"
        assert found.reason == f"stock does not fit the memory: it {found.excluded['stock']}"
        assert "may be taken" in found.excluded["fast"]
        assert set(found.order) == {"frugal", "slow"}


def test_a_forced_candidate_that_does_not_fit_gives_way_to_what_fits(op):
    op.candidate("small", memory=lambda p: 8)(lambda a: a)
    for orders in (Settings(force=(("synthetic", "fast"),)), Settings(threshold=(("synthetic", "cpu", 10**6),))):
        found = chosen(op, {}, square(64), msgspec.structs.replace(orders, memory=100))
        assert found.candidate == "small"
        assert "stock does not fit" in found.reason
    forced = chosen(op, {}, square(64), Settings(force=(("synthetic", "small"),), memory=100))
    assert (forced.candidate, forced.reason) == ("small", "forced by the user")
    assert chosen(op, {}, square(64), Settings(random_seed=3, memory=100)).candidate == "small"


def test_what_nothing_fits_is_refused_with_the_reason(op):
    op.candidate("small", memory=lambda p: 10**6)(lambda a: a)
    with pytest.raises(MemoryBudgetError, match=r"synthetic\(m=640, n=640, float64, cpu\).*\(small\) needs 0.954 MiB"):
        chosen(op, {}, square(640), Settings(memory=10))
    with pytest.raises(MemoryBudgetError, match=r"10 bytes may be taken \(free RAM\)\. What would work: fewer points"):
        chosen(op, {}, square(640), Settings(memory=20), Limit(10, "free RAM"))
    with pytest.raises(MemoryBudgetError, match=r"20 bytes may be taken \(AUTOKERN_MEMORY"):
        chosen(op, {}, square(640), Settings(memory=20), Limit(30, "free RAM"))


def test_bans_hold_for_their_op_dtype_and_device(op):
    usual = {"op": "synthetic", "candidate": "fast", "dtype": "float64", "device": "cpu", "reason": "x"}
    known, winners = profile({"fast": 0.5}), {}
    for change in ({}, {"op": "qr"}, {"candidate": "other"}, {"dtype": "float32"}, {"device": "cuda"}):
        banned = msgspec.structs.replace(known, banned=[Ban(**{**usual, **change})])
        winners[str(change)] = decide(Feasibility(op, square(64)), Chooser(banned, {}), ORDERS_NOTHING).candidate
    assert list(winners.values()) == ["stock"] + ["fast"] * 4


def test_a_set_up_must_be_repaid_by_calls_seen(op):
    """As many calls are expected to come as were seen; the decision says when to look again."""
    known, table = profile({"slow-start": 0.5}), Feasibility(op, square(512))
    known.setup = {"synthetic.slow-start": 0.5 * seconds_of_stock(512) * 100}
    first = decide(table, Chooser(known, {}), ORDERS_NOTHING)
    assert first.candidate == "stock"
    assert 80 < first.review < 120
    assert first.reason == f"a faster candidate compiles first, which {first.review} calls would repay"
    again = decide(table, Chooser(known, {}), ORDERS_NOTHING, seen=first.review)
    assert (again.candidate, again.review) == ("slow-start", 0)
    assert decide(table, Chooser(known, {}), ORDERS_NOTHING, seen=first.review // 2).candidate == "stock"


def test_a_set_up_is_weighed_against_the_best_that_needs_none(op):
    known = profile({"slow-start": 0.5, "fast": 0.52})
    known.setup = {"synthetic.slow-start": 0.5 * seconds_of_stock(512) * 100}
    found = decide(Feasibility(op, square(512)), Chooser(known, {}), Settings(calls=200))
    assert found.candidate == "fast"
    assert found.review > 1000


def told(op, ratios, problem, **more) -> Decision:
    known = chooser(ratios, **more)
    return described(decide(Feasibility(op, problem), known, ORDERS_NOTHING), known, ORDERS_NOTHING)


def test_a_decision_prints_well(op):
    text = str(told(op, {"fast": 0.5, "other": 0.8, "sloppy": 0.1}, square(64)))
    first, second, third, fourth, *rest = text.splitlines()
    assert first == "synthetic(m=64, n=64, float64, cpu)"
    assert second == "  runs fast: predicted to be the fastest, by more than the uncertainty"
    assert third.strip().startswith("2.00 times as fast as stock")
    assert "(measured)" in third
    assert "times follow from" in fourth
    assert sum("→ fast" in line for line in rest) == 1
    assert any("sloppy" in line and "cannot: its accuracy is approximate" in line for line in rest)
    assert any(line.strip().startswith("other") and " µs " in line and line.endswith("in bound") for line in rest)
