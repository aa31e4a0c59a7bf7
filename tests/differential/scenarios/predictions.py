"""Posteriors: models, sizes, library settings, what is read of them, how it is differentiated."""

import contextlib

import gpytorch
import torch
from builders import FOREIGN, LIKELIHOODS, NO_SECOND, PLAIN, STRUCTURED, SUMS, normals, points, regression
from gpytorch import settings as s
from table import See, cases, scenarios

ORDERED = "conjugate gradients that end at a tolerance of 0.01 end at another step when their rounding is another"
CG = "stock's conjugate gradients end at a tolerance of 0.01"

SETTINGS = {
    "defaults": contextlib.nullcontext,
    "fast": s.fast_pred_var,
    "attached": lambda: s.detach_test_caches(False),
    "no cholesky": lambda: s.max_cholesky_size(0),
    "no variances": s.skip_posterior_variances,
    "eager kernels": lambda: s.lazily_evaluate_kernels(False),
    "memory efficient": s.memory_efficient,
    "debug": lambda: s.debug(False),
    "small eager": lambda: s.max_eager_kernel_size(5),
    "fast samples": s.fast_pred_samples,
    "exact": lambda: s.fast_computations(False, False, False),
    "prior": s.prior_mode,
    "trace": s.trace_mode,
}


@contextlib.contextmanager
def under(*names: str):
    wanted = [name for name in names if name != "no cholesky" or s.max_cholesky_size.value() < 10**6]  # else the truth
    with contextlib.ExitStack() as stack:
        for name in wanted:
            stack.enter_context(SETTINGS[name]())
        yield


def read(see: See, name: str, p, model, by=None, joint=True):
    see.posterior(name, p, joint)
    if p.mean.requires_grad:
        see.grads(f"{name} mean", p.mean.sin(), by or model)
    if p.variance.requires_grad:
        see.grads(f"{name} variance", p.variance.sin(), by or model)


@scenarios(
    cases(kernel=[*PLAIN, *SUMS[2:], *STRUCTURED, *FOREIGN[:6], "features"]),
    cases(kernel=[*SUMS[:2], *FOREIGN[6:], "rbf", "attribute", "own + rbf"], rare=True),
    cases(kernel="inducing", kappa=100.0),
    cases(kernel=["scaled rbf", "scaled matern32", "rbf + linear", "own"], setting=["fast", "attached"]),
    cases(kernel=["scaled rbf", "scaled matern52", "rbf + linear"], dtype="float32"),
    cases(setting=[k for k in SETTINGS if k not in ("defaults", "fast", "attached", "no cholesky")]),
    cases(kernel=["own", "rbf + linear"], setting=["small eager", "no variances"]),
    cases(kernel=["scaled rbf", "own", "rbf + linear"], setting="no cholesky", exact=ORDERED, kappa=1e4),
    cases(kernel="scaled matern52", likelihood=[k for k in LIKELIHOODS if k != "gaussian"]),
    cases(likelihood=["gaussian", "fixed"], mean=["zero", "linear mean", "own mean"]),
    cases(likelihood=["gaussian", "fixed", "louder"], setting=["attached", "small eager"], dtype="float32"),
    cases(n=[1, 2], m=[1, 5]),
    cases(n=130, m=[0, 1, 70]),
    cases(n=0, m=4, kernel=["scaled rbf", "own"]),
    cases(n=0, m=4, setting="fast"),
    cases(n=40, m=600, rare=True),
    cases(n=40, m=1100, most=5),
    cases(n=600, m=30, most=5),
    cases(n=100, m=1100, dtype="float32", most=5),
    cases(n=130, m=70, setting=["fast", "attached"], dtype="float32"),
    cases(n=820, m=12, setting=["defaults", "fast"], exact=CG, most=5),
    cases(n=1000, m=3, rare=True, exact=CG, most=5),
    cases(n=820, m=12, library="botorch", most=5),
    cases(batch=["model", "points", "both", "broadcast"], setting=["defaults", "fast", "attached"]),
    cases(batch=["model", "points"], likelihood=["fixed", "counting"]),
)
def a_posterior(
    see, kernel="scaled rbf", setting="defaults", likelihood="gaussian", mean="constant", n=31, m=9, batch="one"
):
    """Two predictions; gradients of both by hyperparameters, and of the second by points."""
    b = () if batch in ("one", "points") else (2,)
    lead = {"points": (3,), "both": (2,), "broadcast": (3, 1)}.get(batch, ())
    with under(setting), torch.set_grad_enabled(n < 800):
        model = regression(see, n, kernel, likelihood, mean, b).eval()
        x, z = points(see, *lead, m, seed=1), points(see, *lead, 6, seed=2).requires_grad_()
        first = model(x)
        read(see, "first", first, model, joint=m <= 130)
        read(see, "second", model(z), model, {**dict(model.named_parameters()), "z": z})
        if b or lead:
            see("one", [first[0].mean, first[0].variance])
        with see.attempt("noisy") if "fixed" in likelihood else contextlib.nullcontext():
            noise = {"noise": torch.full((m,), 0.2, dtype=see.dtype)} if likelihood != "gaussian" else {}
            noisy = model.likelihood(model(x), **noise)
            see("noisy", noisy.variance)
            if m <= 130:
                see("density", noisy.log_prob(torch.zeros(m, dtype=see.dtype)))


PARTS = {
    "slice": lambda p: p[..., 3:9],
    "steps": lambda p: p[..., 1::3],
    "from the end": lambda p: p[..., -4:],
    "list": lambda p: p[..., [1, 4]],
    "none": lambda p: p[..., 3:3],
    "one": lambda p: p[..., 2:3],
    "slice of slice": lambda p: p[..., 2:9][..., 1:4],
    "expanded": lambda p: p.expand(torch.Size([3, *p.batch_shape])),
    "unsqueezed": lambda p: p.unsqueeze(0),
    "jitter": lambda p: p.add_jitter(1e-3),
    "twice": lambda p: p * 2,
    "sum": lambda p: p + p,
    "shifted": lambda p: p + 1.0,
    "independent": lambda p: p.to_data_independent_dist(),
}


@scenarios(cases(part=list(PARTS), m=[11]), cases(part=["none", "slice", "list"], m=[600], kernel="own"))
def parts_of_posteriors(see: See, part: str, m: int, kernel: str = "scaled rbf"):
    model = regression(see, 25, kernel).eval()
    for name, p in (("unread", model(points(see, m, seed=1))), ("read", model(points(see, m, seed=1)))):
        if name == "read":
            see("before", p.variance)
        with see.attempt(f"{name} went"):
            found = PARTS[part](p)
            see(f"{name} mean", found.mean)
            see(f"{name} variance", found.variance)
            if part != "independent":
                see(f"{name} joint", found.covariance_matrix)


@scenarios(
    cases(
        what=["covariance parts", "empty slices", "samples", "root", "divergence", "drawn", "lazy arithmetic"],
        m=[8, 600],
    )
)
def what_is_read(see: See, what: str, m: int):
    model = regression(see, 25).eval()
    p = model(points(see, m, seed=1))
    lazy = p.lazy_covariance_matrix
    see("is lazy", isinstance(lazy, gpytorch.lazy.LazyEvaluatedKernelTensor))
    if what == "covariance parts":
        see("entries", [lazy[..., 1].sum(), lazy[3, 4], lazy[[0, 3], [0, 3]]])
        see("blocks", [lazy[2:5].to_dense(), lazy[1:5, 2:7].to_dense()])
        see("shape", str(tuple(lazy.shape)))
    elif what == "empty slices":
        for name, index in (("none", slice(0, 0)), ("late", slice(m, m)), ("back", slice(5, 2))):
            with see.attempt(name):
                see(f"{name} variance", lazy[index, index].diagonal())
                see(f"{name} dense", lazy[index, index].to_dense())
        with see.attempt("rows"):
            see("no rows", lazy[0:0].to_dense())
    elif what == "samples":
        see("samples", p.rsample(base_samples=normals(see, 4, m)))
        see("noisy", model.likelihood(p).rsample(base_samples=normals(see, 4, m)))
    elif what == "drawn":
        see("sample", p.sample(torch.Size([2])))
        see("sampled again", p.rsample())
    elif what == "root":
        see("root squared", lazy.root_decomposition().to_dense())
        see("inverse product", lazy.add_jitter(1e-2).solve(points(see, m, seed=5)))
    elif what == "divergence":
        see("divergence", torch.distributions.kl_divergence(p.add_jitter(1e-2), p.add_jitter(1e-1)))
    else:
        see("scaled", (lazy * 2.0).diagonal())
        see("added", (lazy + lazy).to_dense())
        see("with noise", lazy.add_diagonal(torch.tensor(0.3, dtype=see.dtype)).diagonal())
        see("product", lazy @ points(see, m, seed=5))


@scenarios(
    cases(kernel=["scaled rbf", "scaled matern32", "rbf + linear"], how=["jacobian", "acquisition", "third"]),
    cases(kernel=["scaled rbf", "own"], how=["third", "jacobian"], setting=["fast", "attached"]),
    kappa=10.0,
    formula=NO_SECOND,
)
def differentiated_posterior(see: See, kernel: str, how: str, setting: str = "defaults"):
    """In ways that are a posterior's own; `contracts` has the others."""
    with under(setting):
        model = regression(see, 18, kernel).eval()
        z = points(see, 4, seed=2).requires_grad_()

        def score(z):
            p = model(z)
            return (p.mean + p.variance.sqrt()).sum()

        if how == "jacobian":
            see("jacobian", torch.autograd.functional.jacobian(lambda z: model(z).variance, z))
            see("hessian", torch.autograd.functional.hessian(score, z))
        elif how == "acquisition":
            batch = points(see, 3, 2, seed=7).requires_grad_()
            sample = model(batch).rsample(base_samples=normals(see, 5, 3, 2))
            see("sample", sample)
            see.grads("sample", sample.max(-1).values, {"points": batch})
        else:
            found = score(z)
            for order in range(3):
                (gradient,) = torch.autograd.grad(found, z, create_graph=True)
                see(f"derivative {order + 1}", gradient)
                found = gradient.sin().sum()
            see.grads("mixed", found, model)
