"""policy.py on synthetic profiles: made-up timings whose right answer is known."""

import msgspec
import pytest
from support.bases import fit_base
from support.synthetic import flops, measured, seconds_of_stock, square, trials, with_candidates

from autokern.core.decision import Decision
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.core.problem import Feasibility
from autokern.core.settings import Settings
from autokern.system.memory import Limit
from autokern.tuning.chooser import Chooser
from autokern.tuning.forest import NOISE
from autokern.tuning.policy import decide, described
from autokern.tuning.profile import Ban, Kept, Profile

NOTHING, USUAL = Profile(), square(64)


@pytest.fixture
def op(make_op):
    return with_candidates(make_op)


def by_threads(make_op, **threads: int):
    op = make_op("synthetic", features=flops)
    for name, count in {"stock": 0, "fast": 0, **threads}.items():
        op.candidate(name, threads=count)(lambda a: a)
    return op


def chosen(op, known, problem=USUAL, there=None, seen=0, **orders) -> Decision:
    """What is decided by a profile or by ratios to stock, under these orders."""
    known = known if isinstance(known, Profile) else measured(known)
    return decide(Feasibility(op, problem), Chooser(known, {}), Settings(**orders), there, seen)


def force(name: str) -> dict[str, object]:
    return {"force": (("synthetic", name),)}


def without(*names: str) -> dict[str, object]:
    return {"exclude": frozenset(names)}


FASTEST = "predicted to be the fastest, by more than the uncertainty"
NONE = "no other candidate is faster by more than the uncertainty"
TWO = {"fast": 0.5, "other": 0.7}


@pytest.mark.parametrize(
    ("ratios", "orders", "candidate", "reason", "source"),
    [
        ({"fast": 0.7, "other": 0.5, "exact": 0.9}, {}, "other", FASTEST, "measured"),
        *(({"fast": ratio}, {}, "stock", NONE, "measured") for ratio in (1.0, 0.99, 1 / (1 + NOISE) + 0.01, 1.5)),
        ({"fast": 0.5, "other": 2.0}, force("other"), "other", "forced by the user", "order"),
        ({}, force("fast"), "fast", "forced by the user", "order"),
        (TWO, force("tall-only"), "stock", "tall-only was forced but cannot serve: not tall", "order"),
        *((TWO, without(name), "other", FASTEST, "measured") for name in ("fast", "synthetic=fast")),
        *((TWO, order, "fast", FASTEST, "measured") for order in (without("qr=fast"), {"force": (("qr", "other"),)})),
    ],
)
def test_the_fastest_wins_and_stock_wins_ties_unless_the_user_orders_otherwise(
    op, ratios, orders, candidate, reason, source
):
    found = chosen(op, ratios, **orders)
    assert (found.candidate, found.reason, found.source) == (candidate, reason, source)
    assert found.margin == pytest.approx(1 / ratios.get(candidate, 1), rel=0.02)
    others = sorted((name for name in ratios if name not in (candidate, *found.excluded)), key=ratios.get)
    assert found.order[: len(others) + 1] == (candidate, *others)
    if "fast" in found.excluded:
        assert found.excluded["fast"] == "excluded by the user"
        assert "fast" not in found.order


def test_what_is_forced_must_be_a_candidate(op):
    with pytest.raises(SettingsError, match="no candidate 'nonsense'; it has stock, fast"):
        chosen(op, TWO, **force("nonsense"))


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
    found = chosen(op, {"fast": all_threads, "fast@1": one})
    assert found.candidate == winner
    assert ("with fewer threads" in found.reason) == (winner == "fast@1" and one > 0.3)
    assert sorted(found.order) == sorted(op.names())


def test_fewer_threads_are_no_reason_on_an_accelerator(make_op):
    op = by_threads(make_op, arrays=1)
    found = chosen(op, measured({"fast": 0.51, "arrays": 0.5}, device="cuda"), square(64, device="cuda"))
    assert found.candidate == "arrays"
    assert "threads" not in found.reason


@pytest.mark.parametrize(("ratio", "winner"), [(0.8, "exact"), (1.0, "exact"), (1.05, "exact"), (1.2, "stock")])
def test_an_exact_result_may_cost_a_little_where_stock_approximates(make_op, ratio, winner):
    loose = with_candidates(make_op, approximates=lambda problem: True)
    assert chosen(loose, {"exact": ratio, "fast": 1.0}).candidate == winner
    assert chosen(loose, {"exact": 1.4, "fast": ratio}).candidate == ("fast" if ratio < 0.9 else "stock")


def test_a_default_candidate_runs_while_nothing_is_measured_and_then_if_it_is_faster(make_op):
    op = with_candidates(make_op, default_candidate=lambda problem: "fast")
    for found in (chosen(op, NOTHING), chosen(op, measured({"fast": 1.5}, (16, 32)), square(2**14))):
        assert (found.candidate, found.source) == ("fast", "unmeasured"), "measurements do not reach so far"
        assert "stock would do far more work" in found.reason
    assert chosen(op, Profile(banned=[Ban("synthetic", "fast", "float64", "cpu", "x")])).candidate == "stock"
    assert [chosen(op, {"fast": ratio}).candidate for ratio in (0.8, 0.98, 1.5)] == ["fast", "stock", "stock"]
    # trials of one kernel say little of a sum of many: each word that no trial has adds to the doubt
    unlike = USUAL.replace(variant="linear+periodic+rq")
    assert [chosen(op, {"fast": ratio}, unlike).candidate for ratio in (0.8, 1.02, 1.5)] == ["fast", "fast", "stock"]
    assert "not known to be faster" in chosen(op, {"fast": 1.02}, unlike).reason


def examined(op, instead: str, ratios, shipped=None) -> list[str]:
    """What serves problems below, within and above the sizes at which the exam keeps other choices."""
    known = measured(ratios)
    known.kept.append(Kept("synthetic", "float64", "cpu", "", False, 50, 100, instead))
    chooser = Chooser(known, {} if shipped is None else {"synthetic@cpu": fit_base(op, [trials(shipped)])})
    return [decide(Feasibility(op, square(n)), chooser, Settings()).candidate for n in (32, 64, 128)]


def test_what_the_exam_kept_serves_at_those_sizes(op):
    assert examined(op, "stock", {"fast": 0.5}) == ["fast", "stock", "fast"]
    assert examined(op, "shipped", {"fast": 0.5}, {"other": 0.6}) == ["fast", "other", "fast"]
    assert examined(op, "shipped", {"fast": 0.5}) == ["fast", "stock", "fast"], "nothing is shipped"


def test_the_exam_makes_no_result_less_exact(make_op):
    """It compares times, at one size; stock's answer may be exact there, and loose at a size beside it."""
    loose = with_candidates(make_op, approximates=lambda problem: True, may_cost=lambda problem: 3.0)
    assert examined(loose, "stock", {"exact": 1.5, "fast": 0.5}) == ["exact", "exact", "exact"]


def test_random_choice_is_feasible_reproducible_and_various(op):
    known = measured({"fast": 5.0})
    draws = [[chosen(op, known, random_seed=seed).candidate for seed in range(40)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {"stock", "fast", "other", "exact"}
    sizes = {chosen(op, known, square(n), random_seed=1).candidate for n in range(2, 60)}
    calls = {chosen(op, known, random_seed=1, seen=seen).candidate for seen in range(60)}
    assert sizes == calls == {"stock", "fast", "other", "exact"}
    assert chosen(op, known, random_seed=1, seen=7).review == 8, "each call is drawn anew"
    assert {chosen(op, known, random_seed=seed, **force("other")).candidate for seed in range(9)} == {"other"}
    roughly = {chosen(op, known, random_seed=seed, accuracy="approximate").candidate for seed in range(40)}
    assert roughly == sizes, "nothing of lower precision is drawn"


def test_memory(op):
    need, ratios = op["fast"].memory(square(64)), measured({"fast": 0.5})
    assert chosen(op, ratios, memory=need).candidate == "fast"
    assert chosen(op, ratios, there=Limit(need, "x")).candidate == "fast"
    op.candidate("frugal", memory=lambda p: need // 2)(lambda a: a)
    op.candidate("slow", memory=lambda p: need // 3, compiles=True)(lambda a: a)
    for limit in ({"memory": need - 1}, {"there": Limit(need - 1, "x")}):
        found = chosen(op, ratios, **limit)
        assert found.candidate == found.order[0] == "frugal"
        assert found.reason == f"stock does not fit the memory: it {found.excluded['stock']}"
        assert "may be taken" in found.excluded["fast"]
        assert set(found.order) == {"frugal", "slow"}


def test_a_forced_candidate_that_does_not_fit_gives_way_to_what_fits(op):
    op.candidate("small", memory=lambda p: 8)(lambda a: a)
    found = chosen(op, {}, memory=100, **force("fast"))
    assert found.candidate == "small"
    assert "stock does not fit" in found.reason
    forced = chosen(op, {}, memory=100, **force("small"))
    assert (forced.candidate, forced.reason) == ("small", "forced by the user")
    assert chosen(op, {}, memory=100, random_seed=3).candidate == "small"


def test_what_nothing_fits_is_refused_with_the_reason(op):
    op.candidate("small", memory=lambda p: 10**6)(lambda a: a)
    for memory, there, told in (
        (10, None, r"synthetic\(m=640, n=640, float64, cpu\).*\(small\) needs 0.954 MiB"),
        (20, Limit(10, "free RAM"), r"10 bytes may be taken \(free RAM\)\. What would work: fewer points"),
        (20, Limit(30, "free RAM"), r"20 bytes may be taken \(AUTOKERN_MEMORY"),
    ):
        with pytest.raises(MemoryBudgetError, match=told):
            chosen(op, {}, square(640), there, memory=memory)


def test_bans_hold_for_their_op_dtype_and_device(op):
    usual = {"op": "synthetic", "candidate": "fast", "dtype": "float64", "device": "cpu", "reason": "x"}
    changes = ({}, {"op": "qr"}, {"candidate": "other"}, {"dtype": "float32"}, {"device": "cuda"})
    known = [msgspec.structs.replace(measured({"fast": 0.5}), banned=[Ban(**{**usual, **each})]) for each in changes]
    assert [chosen(op, each).candidate for each in known] == ["stock"] + ["fast"] * 4


def test_a_set_up_must_be_repaid_by_calls_seen_and_is_weighed_against_the_best_that_needs_none(op):
    """As many calls are expected to come as were seen; the decision says when to look again."""
    known, problem = measured({"slow-start": 0.5}), square(512)
    setup = {"synthetic.slow-start": 0.5 * seconds_of_stock(512) * 100}
    known.setup = setup
    first = chosen(op, known, problem)
    assert first.candidate == "stock"
    assert 80 < first.review < 120
    assert first.reason == f"a faster candidate compiles first, which {first.review} calls would repay"
    again = chosen(op, known, problem, seen=first.review)
    assert (again.candidate, again.review) == ("slow-start", 0)
    assert chosen(op, known, problem, seen=first.review // 2).candidate == "stock"
    assert [chosen(op, known, problem, calls=calls).candidate for calls in (50, 200)] == ["stock", "slow-start"]
    known = measured({"slow-start": 0.5, "fast": 0.52})
    known.setup = setup
    found = chosen(op, known, problem, calls=200)
    assert found.candidate == "fast"
    assert found.review > 1000


def test_a_decision_prints_well(op):
    known = Chooser(measured({"fast": 0.5, "other": 0.8, "sloppy": 0.1}), {})
    found = described(decide(Feasibility(op, square(64)), known, Settings()), known, Settings())
    first, second, third, fourth, *rest = str(found).splitlines()
    assert first == "synthetic(m=64, n=64, float64, cpu)"
    assert second == f"  runs fast: {FASTEST}"
    assert third.strip().startswith("2.00 times as fast as stock")
    assert "(measured)" in third
    rough = msgspec.structs.replace(found, margin=136.75, uncertainty=0.75)
    assert "  about 140 times as fast as stock, within a factor of 2.1 (measured)" in str(rough).splitlines()
    assert "times follow from" in fourth
    assert sum("→ fast" in line for line in rest) == 1
    assert any("sloppy" in line and "cannot: its accuracy is approximate" in line for line in rest)
    assert any(line.strip().startswith("other") and " µs " in line and line.endswith("in bound") for line in rest)
