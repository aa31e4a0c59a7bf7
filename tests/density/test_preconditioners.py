"""Large models against dense algebra in double precision: preconditioners, conjugate gradients, steps of training."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from linear_operator import settings as library
from support.models import ExactModel, step
from support.trees import KERNELS, leaves, problem

import autokern
from autokern.core import decision as solved
from autokern.density import block_cg, gaussian, iterated_density
from autokern.density.preconditioners import Kept, Pivoted, pivots
from autokern.density.vecchia import Vecchia, conditioning
from autokern.kernels import tree as trees

pytestmark = pytest.mark.usefixtures("one_thread")


def reported(*args):
    seen = []
    with solved.collecting(seen.extend):
        found = iterated_density.log_prob(*args)
    return found, seen[-1]


def matrix_of(tree, noise):
    with torch.no_grad():
        return trees.dense(tree) + torch.diag(noise.expand(len(tree.points[0])))


def factor(name, tree, noise):
    plain = tree.each(lambda t: t.detach())
    each = noise.detach().expand(len(plain.points[0])).clone()
    if name == "vecchia":
        return Vecchia(plain, each, conditioning(torch.cat(plain.points, -1), 8))
    return Pivoted(plain, each, pivots(plain, each, 20)[0])


@pytest.mark.parametrize("n", [1, 2, 7, 600, 1300])
@pytest.mark.parametrize("k", [1, 5, 30])
def test_sets_hold_near_predecessors(n, k):
    points = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sets, there = conditioning(points, k)
    order = sets[:, -1]
    assert order.sort().values.equal(torch.arange(n))
    place = torch.empty(n, dtype=torch.long)
    place[order] = torch.arange(n)
    earlier = place[sets[:, :-1]] < torch.arange(n)[:, None]
    assert earlier[there[:, :-1]].all()
    assert there[:, -1].all()
    for row in (n // 2, n - 1):
        true = (points[order[:row]] - points[order[row]]).norm(dim=1).sort().values[:k]
        found = (points[sets[row, :-1][there[row, :-1]]] - points[order[row]]).norm(dim=1).sort().values
        assert len(found) >= min(k, row) // 2
        torch.testing.assert_close(found[: len(found) // 2], true[: len(found) // 2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", ["vecchia", "pivoted"])
def test_factors_are_linear_maps_with_their_log_determinants_and_gradients(kernel, each, name):
    """With all n unit vectors as probes the estimate has no variance, and is the gradient of the log determinant."""
    n = 60
    tree, noise, _ = problem(kernel, n, each=each)
    s, k, unit = factor(name, tree, noise), matrix_of(tree, noise), torch.eye(n, dtype=torch.float64)
    whole = s.apply(unit)
    torch.testing.assert_close(s.turned(unit), whole.mT)
    assert s.logdet == pytest.approx(-2 * torch.linalg.slogdet(whole)[1].item(), abs=1e-8)
    spread = torch.linalg.eigvalsh(whole.mT @ k @ whole)
    assert spread.max() / spread.min() < torch.linalg.cond(k)
    w, m = unit * n**0.5, s.turned(k @ whole)
    u = torch.linalg.solve(m, w)
    sw, su = s.apply(w), s.apply(u)
    noise_slope, *slopes = s.gradients(block_cg.Probed(w, u, sw, su, k @ sw, k @ su))
    own = [*tree.points, *tree.shapes, *tree.weights]
    exact = torch.autograd.grad(
        torch.logdet(trees.dense(tree) + torch.diag(noise.expand(n))), [noise, *own], allow_unused=True
    )
    direct = torch.autograd.grad((su * (trees.dense(tree) @ sw)).sum() / n, own)
    by_noise = noise_slope + (su * sw).mean(1)
    torch.testing.assert_close(by_noise if each else by_noise.sum().view(1), exact[0], rtol=1e-5, atol=1e-6)
    for one, two, truth in zip(slopes, direct, exact[1:], strict=True):
        torch.testing.assert_close(one + two, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["vecchia", "pivoted"])
def test_a_full_factor_gives_the_exact_density_and_derivatives_of_both_orders(kernel, name, monkeypatch):
    n = 80
    tree, noise, residual = problem(kernel, n, each=kernel == "rbf")
    kept = Kept(tree.points[0])
    monkeypatch.setattr(kept, "names", lambda *_: [name])
    monkeypatch.setattr("autokern.density.preconditioners._FEW", n)
    monkeypatch.setattr("autokern.density.preconditioners.most", lambda n: n)
    truth = gaussian.reference(tree, noise, residual)
    found, report = reported(tree, noise, residual, kept, 10, 1e-9)
    assert report.preconditioner == name
    assert report.residual < 1e-9
    left = 1e-7 if name == "vecchia" else 1e-2  # pivots end where little is left
    torch.testing.assert_close(found, truth, rtol=1e-7, atol=0.1 * left)
    wanted = leaves(tree, noise, residual)
    pair = [torch.autograd.grad(3 * value, wanted, create_graph=True) for value in (found, truth)]
    for one, other in zip(*pair, strict=True):
        torch.testing.assert_close(one, other, rtol=left, atol=left * other.abs().max().item())
    torch.testing.assert_close(
        *(torch.autograd.grad(by[0].sum(), [noise, residual]) for by in pair), rtol=left, atol=left
    )


@pytest.mark.parametrize("spoilt", [False, True])
def test_products_in_single_precision_leave_a_residual_in_double_and_where_they_do_not_serve_double_does(
    spoilt, monkeypatch
):
    tree, noise, residual = problem("matern52", 700, noise=0.01)
    wanted, kept, seen, refined = leaves(tree, noise, residual), Kept(tree.points[0]), [], block_cg.refined

    def run():
        found, report = reported(tree, noise, residual, kept, 10, 1e-5)
        return found, report, torch.autograd.grad(found, wanted)

    def nearly(multiply, *args):
        seen.append(refined((lambda v: -multiply(v)) if spoilt else multiply, *args))
        return seen[-1]

    truth, _, gradients = run()
    monkeypatch.setattr(iterated_density, "DENSE", 0)
    monkeypatch.setattr(block_cg, "refined", nearly)
    found, report, others = run()
    assert (seen[0].left <= 1) is not spoilt
    assert report.residual <= 1e-5
    if not spoilt:
        assert report.residual == seen[0].residual
        left = matrix_of(tree, noise) @ seen[0].solution - residual.detach()
        assert left.norm() / residual.detach().norm() < 2e-5
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-8 if spoilt else 0.01 * report.standard_error)
    for one, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
    tries = len(seen)
    run()
    assert len(seen) == tries if spoilt else len(seen) > tries, "single precision that failed is not tried again"


def test_hopeless_systems_are_given_up():
    tree, noise, residual = problem("rbf", 100)
    kept = Kept(tree.points[0])
    assert iterated_density.log_prob(tree, 0 * noise, residual, kept, 10, 1e-6) is None
    assert iterated_density.log_prob(tree, noise, residual * float("nan"), kept, 10, 1e-6) is None
    batch = residual.expand(2, -1)
    assert iterated_density.log_prob(tree, noise, batch, kept, 10, 1e-6) is None


def test_what_does_not_converge_is_not_tried_at_each_step(monkeypatch):
    tree, noise, residual = problem("rbf", 100)
    kept, tried = Kept(tree.points[0]), []
    monkeypatch.setattr(kept, "names", lambda *_: tried.append(1) or [])
    for _ in range(52):
        assert iterated_density.log_prob(tree, noise, residual, kept, 10, 1e-6) is None
    assert len(tried) == 2


@pytest.mark.parametrize(("scale", "by", "probes"), [(1e-6, 1.0, 10), (0.0, 1.0, 10), (1.0, 0.0, 200)])
def test_a_covariance_far_below_the_noise_and_a_residual_of_zero(scale, by, probes):
    tree, noise, residual = problem("rbf", 100)
    residual = (by * residual).detach().requires_grad_()
    tree = tree._replace(weights=[(w * scale).detach().requires_grad_() for w in tree.weights])
    found, report = reported(tree, noise, residual, Kept(tree.points[0]), probes, 1e-8)
    assert report.preconditioner == "vecchia" or scale == 1.0  # there are no pivots
    truth = gaussian.reference(tree, noise, residual)
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=0 if by else 1e-2)
    pair = [torch.autograd.grad(v, [noise, residual, *tree.weights]) for v in (found, truth)]
    torch.testing.assert_close(*pair, rtol=1e-2, atol=1e-3)


@pytest.fixture
def solves(monkeypatch):
    """How many products each preconditioner needs, to be changed at will, and which ones were tried."""
    needs, tried, original = {"pivoted": 3, "vecchia": 12}, [], block_cg.solve

    def solve(multiply, by, *args):
        tried.append(type(by).__name__.lower())
        return original(multiply, by, *args)._replace(products=needs[tried[-1]], left=0.0)

    monkeypatch.setattr(block_cg, "solve", solve)
    return needs, tried


def test_what_served_is_compared_again_when_it_needs_twice_the_products(solves):
    (tree, noise, residual), (needs, tried) = problem("rbf", 100), solves
    kept = Kept(tree.points[0])
    for products, served in (
        *((3, ["pivoted"]), (11, ["pivoted", "vecchia"])),  # a little more each step is found out too
        *((20, ["pivoted"]), (23, ["vecchia", "pivoted"]), (23, ["vecchia"])),
    ):
        tried.clear()
        needs["pivoted"] = products
        _, report = reported(tree, noise, residual, kept, 10, 1e-6)
        assert (report.preconditioner, sorted(tried)) == (served[0], sorted(served))


def test_pivots_that_leave_much_are_not_tried_beside_neighbours_that_converge(solves, monkeypatch):
    tree, noise, residual = problem("matern52", 200)
    kept = Kept(tree.points[0])
    monkeypatch.setattr(kept, "_chosen", lambda *_: (torch.arange(3), 3.5))
    _, report = reported(tree, noise, residual, kept, 10, 1e-6)
    assert (report.preconditioner, solves[1]) == ("vecchia", ["vecchia"])


def test_a_tighter_tolerance_of_the_library_holds(monkeypatch):
    x = torch.rand(1100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model, asked, original = ExactModel(x, x[:, 0].sin()).double().train(), [], iterated_density.log_prob
    monkeypatch.setattr(iterated_density, "log_prob", lambda *args: asked.append(args[-2:]) or original(*args))
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "preconditioned"}):
        step(model)
        with library.cg_tolerance(1e-8), library.num_trace_samples(7):
            step(model)
    assert asked == [(10, 1e-5), (7, 1e-8)]


PRECONDITIONED, ON_A_LINE = {"exact_log_prob": "preconditioned"}, {"exact_log_prob": "state-space"}


def made(kernel, n=1100, d=2, dtype=torch.float64):
    draw = torch.Generator().manual_seed(n)
    x = torch.rand(n, d, generator=draw, dtype=torch.float64).to(dtype)
    y = (6 * x.sum(-1)).sin() + 0.1 * torch.randn(n, generator=draw, dtype=torch.float64).to(dtype)
    model = ExactModel(x, y, kernel).to(dtype).train()
    model.likelihood.noise = 0.05
    return model


def moved(model):
    """After steps of an optimiser, whose second is large."""
    for by in (0.0, -0.3, 0.7):
        with torch.no_grad():
            for parameter in model.covar_module.parameters():
                parameter.add_(by)
        yield


def replaced(model):
    """After its kernel has got other parts."""
    for part in (MaternKernel(0.5), RBFKernel() + MaternKernel(0.5), MaternKernel(0.5, active_dims=[1])):
        model.covar_module.base_kernel = part.double()
        yield


def compared(model):
    """Loss and gradients by the candidate that serves, and exact ones."""
    exact = copy.deepcopy(model).double()
    with gpytorch.settings.fast_computations(False, False, False):
        expected = step(exact)
    with autokern.enabled():
        return step(model), expected


CASES = {
    "fused": (lambda: made(KERNELS["matern52"](), 1000), None, moved, 1e-11, 1e-8),
    "fused of a sum": (lambda: made(KERNELS["sum"](), 1000), None, moved, 1e-11, 1e-8),
    "preconditioned": (lambda: made(None), PRECONDITIONED, moved, 1e-4, 1e-3),
    "preconditioned in float32": (lambda: made(None, dtype=torch.float32), PRECONDITIONED, moved, 1e-4, 1e-2),
    "preconditioned with other parts": (lambda: made(None), PRECONDITIONED, replaced, 1e-3, 5e-2),
    "state-space": (lambda: made(KERNELS["matern12"](), 1200, 1), None, moved, 1e-10, 1e-7),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_of_training_are_exact_ones(name):
    make, force, changes, bound, slope = CASES[name]
    model, state, count = make(), torch.random.get_rng_state(), 0
    for _ in changes(model):
        with autokern.using(force=force):
            (loss, found), (exact, truth) = compared(model)
        assert loss.item() == pytest.approx(exact.item(), abs=bound)
        size = torch.cat([one.flatten() for one in truth]).norm()
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0, atol=slope * size.item())
        count += 1
    assert autokern.stats()["exact_log_prob"] == {name.partition(" ")[0]: count}
    assert torch.random.get_rng_state().equal(state)


OTHERS = {
    "a product": (lambda: MaternKernel(2.5) * MaternKernel(1.5), 1),
    "a smooth part": (lambda: MaternKernel(2.5) + RBFKernel(), 1),
    "two dimensions": (lambda: MaternKernel(2.5), 2),
    "a leaf that takes the dimension twice": (lambda: MaternKernel(active_dims=(0, 0)) + MaternKernel(), 1),
}


@pytest.mark.parametrize(("kernel", "d"), OTHERS.values(), ids=OTHERS)
def test_other_models_than_those_on_a_line_are_left_to_others(kernel, d):
    with autokern.using(force=ON_A_LINE):
        (loss, found), (exact, truth) = compared(made(kernel(), 500, d))
    assert "state-space" not in autokern.stats()["exact_log_prob"]
    torch.testing.assert_close(loss, exact, rtol=1e-10, atol=0)
    torch.testing.assert_close(found, truth, rtol=1e-7, atol=1e-7)
