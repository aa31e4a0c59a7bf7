"""costs.py and policy.py on synthetic profiles: made-up timings whose right answer is known."""

from __future__ import annotations

import math

import msgspec
import pytest
from autokern.tuning.cost_model import CostModel
from hypothesis import given, settings
from hypothesis import strategies as st

from autokern.core.decision import Cost, Decision
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.core.feasibility import Feasibility
from autokern.core.problem import Features, Problem
from autokern.core.registry import get, registered
from autokern.core.settings import Settings
from autokern.system.memory_limit import Limit
from autokern.tuning.obstacles import obstacles
from autokern.tuning.policy import NOISE, decide
from autokern.tuning.profile import Ban, Profile, Timing, Trial, group_key

ORDERS_NOTHING = Settings()
SIZES = (16, 32, 64, 128, 256, 512, 1024)


@pytest.fixture
def op(make_op):
    """An op whose stock takes flops, with candidates of every kind."""
    made = make_op("synthetic", features=lambda p: Features(calls=1, flops=float(p.m * p.n * p.n)))
    made.candidate("stock")(lambda a: a)
    made.candidate("fast")(lambda a: a)
    made.candidate("other")(lambda a: a)
    made.candidate("exact", accuracy="better")(lambda a: a)
    made.candidate("sloppy", accuracy="approximate")(lambda a: a)
    made.candidate("slow-start", compiles=True)(lambda a: a)
    made.candidate("tall-only", unsupported=lambda p: None if p.m >= 2 * p.n else "not tall")(lambda a: a)
    return made


def square(n: int, **more: object) -> Problem:
    return Problem(op="synthetic", m=n, n=n, **more)


def seconds_of_stock(n: int) -> float:
    return 1e-6 + 1e-11 * n**3


def synthetic_profile(ratios, sizes=SIZES, noise: float = 0.005, **more: object) -> Profile:
    """Timings by name: a number, or a function of the size; stock takes a microsecond and 1e-11 seconds per flop."""
    trials = []
    for n in sizes:
        stock = seconds_of_stock(n)
        timings = {"stock": Timing(stock)}
        for name, ratio in ratios.items():
            r = ratio(n) if callable(ratio) else ratio
            timings[name] = Timing(stock * r, r, noise, 5, relative_error=1e-4 if name == "sloppy" else None)
        trials.append(Trial(square(n, **more), timings))
    return Profile(trials=trials)


def chosen(op, ratios, problem, orders=ORDERS_NOTHING, there=None, **more) -> Decision:
    return decide(Feasibility(op, problem), CostModel(synthetic_profile(ratios, **more)), orders, there)


# --- the cost model ---------------------------------------------------------------------------------------------------


def test_what_was_measured_is_predicted(op):
    model = CostModel(synthetic_profile({"fast": lambda n: 0.5 if n < 200 else 1.5}))
    for n in SIZES:
        found = model.estimate(op, square(n), op.candidates)
        assert found["stock"].seconds == pytest.approx(seconds_of_stock(n), rel=0.05)
        assert found["fast"].log_ratio == pytest.approx(math.log(0.5 if n < 200 else 1.5), abs=0.1)
        assert found["fast"].distance == 0
    assert set(found) == {"stock", "fast"}


def test_interpolation_between_measured_sizes(op):
    model = CostModel(synthetic_profile({"fast": lambda n: n / 256}))
    for n in (45, 90, 181, 362, 724):
        found = model.estimate(op, square(n), op.candidates)
        assert found["stock"].seconds == pytest.approx(seconds_of_stock(n), rel=0.1)
        assert found["fast"].log_ratio == pytest.approx(math.log(n / 256), abs=0.15)


def test_extrapolation_by_flops(op):
    """Sixteen times beyond the largest measurement, time still grows with the flops."""
    model = CostModel(synthetic_profile({"fast": 0.5}))
    found = model.estimate(op, square(16 * 1024), op.candidates)
    assert found["stock"].seconds == pytest.approx(seconds_of_stock(16 * 1024), rel=0.2)
    assert found["fast"].seconds == pytest.approx(0.5 * found["stock"].seconds, rel=0.2)


def test_fixed_costs_dominate_below(op):
    found = CostModel(synthetic_profile({"fast": 0.5})).estimate(op, square(1), op.candidates)
    assert found["stock"].seconds == pytest.approx(1e-6, rel=0.3)


def test_uncertainty_grows_with_distance(op):
    model = CostModel(synthetic_profile({"fast": 0.5}, sizes=(64, 128)))
    sigmas = [model.estimate(op, square(n), op.candidates)["fast"].sigma for n in (128, 181, 256, 512, 2048, 2**15)]
    assert sigmas == sorted(sigmas)
    assert sigmas[0] < 0.05 < sigmas[-1]
    apart = model.estimate(op, square(128, variant="rows"), op.candidates)["fast"].sigma
    assert sigmas[0] < apart


def test_noisy_measurements_are_less_certain(op):
    quiet, noisy = (CostModel(synthetic_profile({"fast": 0.5}, noise=s)) for s in (0.005, 0.3))
    one, other = (m.estimate(op, square(64), op.candidates)["fast"].sigma for m in (quiet, noisy))
    assert one < other


def test_devices_and_ops_do_not_speak_for_each_other_but_dtypes_do(op):
    model = CostModel(synthetic_profile({"fast": 0.5}))
    for problem in (square(64, device="cuda"), Problem(op="qr", m=64, n=64)):
        assert not model.knows(problem)
        assert model.estimate(op, problem, op.candidates) == {}
    other, same = (model.estimate(op, square(64, dtype=t), op.candidates)["fast"] for t in ("float32", "float64"))
    assert not model.knows(square(64, dtype="float32")), "the dtype itself is not measured"
    assert other.log_ratio == pytest.approx(same.log_ratio, abs=0.1)
    assert other.sigma > same.sigma


def test_a_few_trials_are_no_knowledge_unless_they_are_the_whole_grid(op):
    few, enough = (synthetic_profile({"fast": 0.5}, sizes=sizes) for sizes in ((64, 128), (32, 64, 128, 256, 512)))
    assert not CostModel(few).knows(square(64))
    assert CostModel(enough).knows(square(64))
    few.levels[group_key(*square(64).group)] = "quick"
    assert CostModel(few).knows(square(64))


def test_a_few_trials_are_used_with_caution(op):
    few, enough = (synthetic_profile({"fast": 0.5}, sizes=sizes) for sizes in ((64,), (32, 64, 128, 256, 512)))
    one, many = (CostModel(p).estimate(op, square(4 * p.trials[-1].problem.n), op.candidates) for p in (few, enough))
    assert one["fast"].sigma > max(0.1, many["fast"].sigma)
    assert CostModel(few).estimate(op, square(64), op.candidates)["fast"].sigma < 0.1


def test_trials_without_stock_tell_nothing(op):
    profile = Profile(trials=[Trial(square(64), {"fast": Timing(1e-3, 0.5)}), Trial(square(32), {})])
    assert not CostModel(profile).knows(square(64))


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_the_fastest_wins(op):
    found = chosen(op, {"fast": 0.7, "other": 0.5, "exact": 0.9}, square(64))
    assert (found.candidate, found.source) == ("other", "measured")
    assert found.margin == pytest.approx(2.0, rel=0.1)
    assert next(iter(found.predicted)) == "other"
    assert found.order[:4] == ("other", "fast", "exact", "stock")


@pytest.mark.parametrize("ratio", [1.0, 0.99, 1 / (1 + NOISE) + 0.01, 1.5])
def test_stock_wins_ties(op, ratio):
    found = chosen(op, {"fast": ratio}, square(64))
    assert (found.candidate, found.margin) == ("stock", 1.0)
    assert "no other candidate" in found.reason


@pytest.mark.parametrize(
    ("all_threads", "two", "one", "winner"),
    [
        (0.5, 0.5, 0.5, "fast@1"),
        (0.5, 0.51, 0.52, "fast@1"),
        (0.5, 0.51, 0.7, "fast@2"),
        (0.5, 0.7, 0.8, "fast"),
        (0.9, 0.9, 0.3, "fast@1"),
        (1.0, 1.0, 0.99, "stock"),
    ],
)
def test_of_near_ties_the_fewest_threads_run(make_op, all_threads, two, one, winner):
    op = make_op("synthetic", features=lambda p: Features(calls=1, flops=float(p.m * p.n * p.n)))
    op.candidate("stock")(lambda a: a)
    op.candidate("fast")(lambda a: a)
    for count in (1, 2):
        op.candidate(f"fast@{count}", threads=count)(lambda a: a)
    ratios = {"fast": all_threads, "fast@2": two, "fast@1": one}
    found = chosen(op, ratios, square(64), sizes=SIZES * 2)
    assert found.candidate == winner
    assert sorted(found.order) == sorted(op.names())


def test_stock_wins_where_little_is_known(op):
    ratios = {"fast": 0.85}
    assert chosen(op, ratios, square(64), sizes=(64,)).candidate == "fast"
    far = chosen(op, ratios, square(2**14), sizes=(64,))
    assert (far.candidate, far.source) == ("stock", "extrapolated")
    assert chosen(op, ratios, square(64, variant="a/b/c"), sizes=(64,)).candidate == "stock"
    assert chosen(op, ratios, square(64), sizes=(64,), noise=0.5).candidate == "stock"


@pytest.mark.parametrize(("ratio", "winner"), [(0.8, "fast"), (0.999, "stock"), (1.5, "stock")])
def test_where_little_is_known_the_default_candidate_need_only_be_likely(make_op, ratio, winner):
    made = make_op("synthetic", default_candidate=lambda problem: "fast")
    for name in ("stock", "fast"):
        made.candidate(name)(lambda a: a)
    found = chosen(made, {"fast": ratio}, square(2**14), sizes=(16, 32), noise=0.6)
    assert found.candidate == winner
    if winner == "fast":
        assert found.reason == "likely the fastest: stock does far more work and is not known to be faster"


def test_nothing_measured_means_stock(op):
    found = decide(Feasibility(op, square(64)), CostModel(Profile()), ORDERS_NOTHING)
    assert (found.candidate, found.source, found.predicted) == ("stock", "unmeasured", {})


def test_only_choice(make_op):
    made = make_op("alone")
    made.candidate("stock")(lambda a: a)
    found = decide(Feasibility(made, Problem(op="alone")), CostModel(Profile()), ORDERS_NOTHING)
    assert (found.candidate, found.source) == ("stock", "only choice")


def test_the_winner_changes_where_the_data_say(op):
    ratios = {"fast": lambda n: (n / 200) ** 0.7}
    winners = {n: chosen(op, ratios, square(n)).candidate for n in (20, 50, 100, 150, 260, 400, 800, 1000)}
    assert [winners[n] for n in (20, 50, 100, 150)] == ["fast"] * 4
    assert [winners[n] for n in (260, 400, 800, 1000)] == ["stock"] * 4


def test_sources_name_the_distance(op):
    ratios = {"fast": 0.3}
    assert chosen(op, ratios, square(64)).source == "measured"
    assert chosen(op, ratios, square(90)).source == "interpolated"
    assert chosen(op, ratios, square(64 * 1024)).source == "extrapolated"


def test_decisions_are_deterministic(op):
    ratios = {"fast": 0.5, "other": 0.5, "exact": 0.5}
    first = chosen(op, ratios, square(77))
    assert all(chosen(op, ratios, square(77)) == first for _ in range(3))
    model = CostModel(synthetic_profile(ratios))
    assert (
        decide(Feasibility(op, square(77)), model, ORDERS_NOTHING)
        == decide(Feasibility(op, square(77)), model, ORDERS_NOTHING)
        == first
    )


def test_a_poisoned_trial_of_another_candidate_does_no_harm(op):
    profile = synthetic_profile({"fast": 0.5})
    profile.trials.append(Trial(square(96), {"stock": Timing(1e-5), "removed-since": Timing(1e-9, 1e-9)}))
    found = decide(Feasibility(op, square(64)), CostModel(profile), ORDERS_NOTHING)
    assert found.candidate == "fast"
    assert "removed-since" not in found.order


# --- what the user ordered --------------------------------------------------------------------------------------------


def test_force(op):
    found = chosen(op, {"fast": 0.5, "other": 2.0}, square(64), Settings(force=(("synthetic", "other"),)))
    assert (found.candidate, found.reason, found.source) == ("other", "forced by the user", "order")
    assert found.margin == pytest.approx(0.5, rel=0.1)
    assert found.order[:2] == ("other", "fast")


def test_force_of_stock_and_of_another_op(op):
    ratios = {"fast": 0.5}
    assert chosen(op, ratios, square(64), Settings(force=(("synthetic", "stock"),))).candidate == "stock"
    assert chosen(op, ratios, square(64), Settings(force=(("qr", "native"),))).candidate == "fast"


def test_force_needs_no_measurement(op):
    found = decide(Feasibility(op, square(64)), CostModel(Profile()), Settings(force=(("synthetic", "fast"),)))
    assert (found.candidate, found.source) == ("fast", "order")


def test_force_of_what_cannot_serve_means_stock_and_says_why(op):
    found = chosen(op, {"fast": 0.5}, square(64), Settings(force=(("synthetic", "tall-only"),)))
    assert found.candidate == "stock"
    assert found.reason == "tall-only was forced but cannot serve: not tall"


def test_force_of_what_does_not_exist(op):
    with pytest.raises(SettingsError, match="no candidate 'nonsense' to force; it has stock, fast"):
        chosen(op, {"fast": 0.5}, square(64), Settings(force=(("synthetic", "nonsense"),)))


@pytest.mark.parametrize("name", ["fast", "synthetic=fast"])
def test_exclude(op, name):
    found = chosen(op, {"fast": 0.5, "other": 0.7}, square(64), Settings(exclude=frozenset({name})))
    assert found.candidate == "other"
    assert found.excluded["fast"] == "excluded by the user"
    assert "fast" not in found.order


def test_exclude_for_another_op_is_none_of_ours(op):
    assert chosen(op, {"fast": 0.5}, square(64), Settings(exclude=frozenset({"qr=fast"}))).candidate == "fast"


def test_stock_is_refused_for_want_of_memory_only(op):
    orders = Settings(exclude=frozenset({"stock"}))
    model = CostModel(Profile(banned=[Ban("synthetic", "stock", "float64", "cpu", "x")]))
    assert "stock" not in obstacles(Feasibility(op, square(64)), model, orders, Limit(10**9, "x"))
    for memory, there in ((1, None), (None, Limit(1, "x"))):
        narrow = msgspec.structs.replace(orders, memory=memory)
        assert "may be taken" in obstacles(Feasibility(op, square(64)), model, narrow, there)["stock"]


def test_approximate_candidates_only_when_asked_for(op):
    ratios = {"sloppy": 0.1, "exact": 0.5}
    found = chosen(op, ratios, square(64))
    assert found.candidate == "exact"
    assert "accuracy is approximate" in found.excluded["sloppy"]
    assert chosen(op, ratios, square(64), Settings(accuracy="approximate")).candidate == "sloppy"


def test_memory(op):
    need = op["fast"].memory(square(64))
    ratios = {"fast": 0.5}
    assert chosen(op, ratios, square(64), Settings(memory=need)).candidate == "fast"
    assert chosen(op, ratios, square(64), there=Limit(need, "x")).candidate == "fast"
    op.candidate("frugal", memory=lambda p: need // 2)(lambda a: a)
    op.candidate("slow", memory=lambda p: need // 3, compiles=True)(lambda a: a)
    for orders, there in (
        (Settings(memory=need - 1), None),
        (ORDERS_NOTHING, Limit(need - 1, "x")),
        (Settings(memory=10 * need), Limit(need - 1, "x")),
        (Settings(memory=need - 1), Limit(10 * need, "x")),
    ):
        found = chosen(op, ratios, square(64), orders, there)
        assert found.candidate == "frugal"
        assert found.reason == f"stock does not fit the memory: it {found.excluded['stock']}"
        assert "may be taken" in found.excluded["fast"]
        assert found.order[0] == "frugal"
        assert set(found.order) == {"frugal", "slow"}


def test_of_what_fits_the_fastest_is_taken(op):
    op.candidate("small", memory=lambda p: 8)(lambda a: a)
    op.candidate("smaller", memory=lambda p: 4)(lambda a: a)
    found = chosen(op, {"fast": 0.5, "small": 2.0, "smaller": 3.0}, square(64), Settings(memory=100))
    assert (found.candidate, found.source) == ("small", "measured")
    assert found.margin < 1


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
    with pytest.raises(MemoryBudgetError, match=r"\(free RAM\)\. What would work: .*float32"):  # half of it fits
        chosen(op, {}, square(640), Settings(), Limit(600_000, "free RAM"))
    with pytest.raises(MemoryBudgetError, match=r"20 bytes may be taken \(AUTOKERN_MEMORY"):
        chosen(op, {}, square(640), Settings(memory=20), Limit(30, "free RAM"))


def test_bans_hold_for_their_op_dtype_and_device(op):
    def with_ban(**more: str) -> str:
        ban = Ban(
            **{"op": "synthetic", "candidate": "fast", "dtype": "float64", "device": "cpu", "reason": "x", **more}
        )
        profile = synthetic_profile({"fast": 0.5})
        profile.banned.append(ban)
        return decide(Feasibility(op, square(64)), CostModel(profile), ORDERS_NOTHING).candidate

    assert with_ban() == "stock"
    for other in ({"op": "qr"}, {"candidate": "other"}, {"dtype": "float32"}, {"device": "cuda"}):
        assert with_ban(**other) == "fast"


def test_a_set_up_must_be_repaid_by_declared_calls(op):
    profile = synthetic_profile({"slow-start": 0.5})
    saving = 0.5 * seconds_of_stock(512) * 1000
    for seconds, winner in ((0.5 * saving, "slow-start"), (2 * saving, "stock"), (None, "stock")):
        profile.setup = {} if seconds is None else {"synthetic.slow-start": seconds}
        assert decide(Feasibility(op, square(512)), CostModel(profile), Settings(calls=1000)).candidate == winner
        assert decide(Feasibility(op, square(512)), CostModel(profile), Settings(calls=0)).candidate == "stock"


def test_a_set_up_must_be_repaid_by_calls_seen(op):
    """As many calls are expected to come as were seen; the decision says when to look again."""
    profile = synthetic_profile({"slow-start": 0.5})
    profile.setup = {"synthetic.slow-start": 0.5 * seconds_of_stock(512) * 100}
    first = decide(Feasibility(op, square(512)), CostModel(profile), ORDERS_NOTHING)
    assert first.candidate == "stock"
    assert 80 < first.review < 120
    assert str(first.review) in first.reason
    again = decide(Feasibility(op, square(512)), CostModel(profile), ORDERS_NOTHING, seen=first.review)
    assert (again.candidate, again.review) == ("slow-start", 0)
    assert (
        decide(Feasibility(op, square(512)), CostModel(profile), ORDERS_NOTHING, seen=first.review // 2).candidate
        == "stock"
    )


def test_a_set_up_is_weighed_against_the_best_that_needs_none(op):
    profile = synthetic_profile({"slow-start": 0.5, "fast": 0.52})
    profile.setup = {"synthetic.slow-start": 0.5 * seconds_of_stock(512) * 100}
    found = decide(Feasibility(op, square(512)), CostModel(profile), Settings(calls=200))
    assert found.candidate == "fast"
    assert found.review > 1000


def test_random_choice_is_feasible_reproducible_and_various(op):
    model = CostModel(synthetic_profile({"fast": 5.0}))
    draws = {
        seed: decide(Feasibility(op, square(64)), model, Settings(random_seed=seed)).candidate for seed in range(40)
    }
    assert set(draws.values()) == {"stock", "fast", "other", "exact"}
    assert all(
        decide(Feasibility(op, square(64)), model, Settings(random_seed=s)).candidate == c for s, c in draws.items()
    )
    sizes = {decide(Feasibility(op, square(n)), model, Settings(random_seed=1)).candidate for n in range(2, 60)}
    assert sizes == {"stock", "fast", "other", "exact"}


def test_random_choice_leaves_room_for_an_order(op):
    model = CostModel(synthetic_profile({"fast": 5.0}))
    orders = [Settings(random_seed=seed, force=(("synthetic", "other"),)) for seed in range(9)]
    assert {decide(Feasibility(op, square(64)), model, order).candidate for order in orders} == {"other"}


def test_thresholds_of_the_user_beat_measurements():
    qr = get("qr")
    profile = synthetic_cuda_profile()
    orders = Settings(threshold=(("qr", "cuda", 300),))
    for n, want in ((200, "cpu"), (300, "cpu"), (301, "stock"), (600, "stock"), (64, "stock")):
        problem = Problem(op="qr", m=n, n=n, device="cuda")
        found = decide(Feasibility(qr, problem), CostModel(profile), orders)
        assert found.candidate == want, n  # above: stock runs on the device; at 64 columns: on the CPU, as ordered
        assert "ordered by the user" in found.reason
    table = Feasibility(qr, Problem(op="qr", m=64, n=64, device="cuda"))
    found = decide(table, CostModel(profile), Settings(threshold=(("qr", "cuda", 9),)))
    assert found.candidate == "native"


# --- a made-up GPU, replayed on any machine ---------------------------------------------------------------------------


def synthetic_cuda_profile(crossover: int = 512) -> Profile:
    """QR on a GPU that does not exist: the CPU detour is faster below a crossover, slower above.

    Stock takes the detour up to 128 columns and stays on the device above.
    """
    trials = []
    for n in (16, 32, 64, 128, 192, 256, 512, 1024, 2048):
        cpu, device = 1e-9 * n**2.5, 1e-9 * crossover * n**1.5
        problem = Problem(op="qr", m=n, n=n, device="cuda")
        if n <= 128:
            timings = {"stock": Timing(cpu), "native": Timing(device, device / cpu, 0.01, 5)}
        else:
            timings = {"stock": Timing(device), "cpu": Timing(cpu, cpu / device, 0.01, 5)}
        trials.append(Trial(problem, timings))
    return Profile(trials=trials)


@pytest.mark.parametrize("crossover", [32, 512])
def test_a_recorded_gpu_decides_here_as_its_data_say(crossover):
    qr, model = get("qr"), CostModel(synthetic_cuda_profile(crossover))
    for n in (20, 64, 100, 150, 256, 400, 700, 1024, 1500):
        found = decide(Feasibility(qr, Problem(op="qr", m=n, n=n, device="cuda")), model, ORDERS_NOTHING)
        runs = {"stock": "cpu" if n <= 128 else "native"}.get(found.candidate, found.candidate)
        assert runs == ("cpu" if n < crossover else "native"), (n, str(found))


def test_a_recorded_gpu_has_a_threshold():
    found = synthetic_cuda_profile(512).thresholds("qr", "cuda", "float64")
    assert [(c.below, c.above) for c in found] == [("stock", "cpu"), ("cpu", "stock")]
    assert found[-1].size == pytest.approx(512, rel=0.5)


def test_candidates_for_the_cpu_do_not_serve_a_gpu_and_the_reverse():
    for op in registered():
        for device, absent in (("cuda", "accelerator"), ("cpu", "cpu")):
            grid = op.grid("quick", "float64", device)
            assert all(absent not in [c.name for c in op.feasible(p)] for p in grid)


# --- whatever a profile holds -----------------------------------------------------------------------------------------

wild = st.builds(
    Timing,
    seconds=st.floats(2e-12, 1e8),
    ratio=st.floats(2e-12, 1e8),
    noise=st.floats(0, 1e8),
    rounds=st.integers(1, 9),
)
any_trial = st.builds(
    Trial,
    st.builds(
        Problem,
        op=st.just("matmul"),
        m=st.integers(1, 2**40),
        n=st.integers(1, 2**40),
        rhs=st.integers(0, 2**40),
        batch=st.integers(1, 2**40),
        variant=st.sampled_from(["", "rows", "columns", "a/b/c/d", "/"]),
        grad=st.sampled_from(["", "a", "theta/x"]),
    ),
    st.dictionaries(st.sampled_from(["stock", "transposed", "gone"]), wild, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(any_trial, max_size=6), st.integers(8, 5000), st.integers(2, 64))
def test_any_valid_profile_costs_only_speed(trials, n, columns):
    problem = Problem(op="matmul", m=n, n=n, rhs=columns, variant="rows")
    found = decide(Feasibility(get("matmul"), problem), CostModel(Profile(trials=trials)), ORDERS_NOTHING)
    assert found.candidate in [c.name for c in get("matmul").feasible(problem)]


def test_a_variant_that_no_op_has_costs_only_speed():
    op = get("kernel_matrix")
    usual = op.grid("quick", "float64", "cpu")[0]
    timings = {"stock": Timing(1e-3), "gemm": Timing(5e-4, 0.5)}
    for variant in ("", "nonsense", "nonsense/same/ard", "rbf"):
        profile = Profile(trials=[Trial(usual.replace(variant=variant), timings), Trial(usual, timings)])
        assert decide(Feasibility(op, usual), CostModel(profile), ORDERS_NOTHING).candidate in op.names()


# --- how it prints ----------------------------------------------------------------------------------------------------


def test_a_decision_prints_well(op):
    text = str(chosen(op, {"fast": 0.5, "other": 0.8, "sloppy": 0.1}, square(64)))
    first, second, third, *rest = text.splitlines()
    assert first == "synthetic(m=64, n=64, float64, cpu)"
    assert second == "  runs fast: predicted to be the fastest, by more than the uncertainty"
    assert third.strip().startswith("2.0")
    assert "times as fast as stock" in third
    assert "(measured)" in third
    assert sum("→ fast" in line for line in rest) == 1
    assert any("sloppy" in line and "cannot: its accuracy is approximate" in line for line in rest)
    assert any(line.strip().startswith("other") and " µs " in line and line.endswith("in bound") for line in rest)


@pytest.mark.parametrize(("seconds", "text"), [(2.0, "2.00 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.50 µs")])
def test_durations(seconds, text):
    cost = Cost(seconds=seconds, flops=3e9 * seconds, memory=2**21)
    told = Decision(problem=square(4), candidate="stock", reason="r", source="s", costs={"stock": cost})
    assert " ".join(str(told).split("→ stock")[1].split()) == f"{text} 3 Gflop/s 2 MiB in bound"


def test_a_decision_is_a_value(op):
    found = chosen(op, {"fast": 0.5}, square(64))
    with pytest.raises(AttributeError):
        found.candidate = "stock"
    assert msgspec.json.decode(msgspec.json.encode(found), type=Decision) == found
