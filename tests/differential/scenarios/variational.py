"""Sparse variational models: bounds, training distributions, deep models, tasks, predictions after a training step."""

import gpytorch
import torch
from builders import FOREIGN, KERNELS, MEANS, PLAIN, STRUCTURED, SUMS, points
from gpytorch import variational as v
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from table import See, cases, scenarios

from scenarios.training import descended

KINDS = {
    "cholesky": v.CholeskyVariationalDistribution,
    "mean field": v.MeanFieldVariationalDistribution,
    "delta": v.DeltaVariationalDistribution,
    "natural": v.NaturalVariationalDistribution,
    "tril natural": v.TrilNaturalVariationalDistribution,
}
LIKELIHOODS = {
    "gaussian": gpytorch.likelihoods.GaussianLikelihood,
    "bernoulli": gpytorch.likelihoods.BernoulliLikelihood,
    "student t": gpytorch.likelihoods.StudentTLikelihood,
}


def _fill(distribution):
    """Whitened values that are not the prior's."""
    with torch.no_grad():
        for k, p in enumerate(distribution.parameters()):
            p.add_(torch.sin(torch.arange(p.numel()) + k).view_as(p), alpha=0.1)
    return distribution


class Sparse(ApproximateGP):
    """A model; `maps` its points first. A batch may have the same inducing points, or `all` but the values the same."""

    def __init__(self, see, kernel, m, kind="cholesky", mean="constant", b=(), learn=True, maps=None, same=False, d=2):
        b = torch.Size(b)
        inducing = points(see, *(() if same else b), m, seed=4, d=d)
        distribution = _fill(KINDS[kind](m, batch_shape=b))
        super().__init__(v.VariationalStrategy(self, inducing, distribution, learn_inducing_locations=learn))
        self.variational_strategy.variational_params_initialized.fill_(1)
        own = torch.Size() if same == "all" else b
        self.mean_module, self.covar_module, self.maps = MEANS[mean](own), KERNELS[kernel](own), maps

    def forward(self, x):
        x = x if self.maps is None else self.maps(x)
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _target(x, likelihood="gaussian"):
    y = (5 * x).sum(-1).sin()
    return (y > 0).to(x) if likelihood == "bernoulli" else y


@scenarios(
    cases(kernel=[*PLAIN, *SUMS, *STRUCTURED[:2], *FOREIGN, "rff", "active dimension"], kappa=10.0),
    cases(kernel="scaled rbf", kind=list(KINDS)[1:], n=[30, 5]),
    cases(kernel="own", kind=["mean field", "delta"]),
    cases(kernel=["scaled rbf", "scaled matern52"], m=[1, 9, 20], n=[1, 9]),
    cases(kernel=["scaled rbf", "scaled matern52", "rbf + matern", "own"], n=[30, 5], dtype="float32", kappa=10.0),
    cases(kernel="scaled rbf", likelihood=["bernoulli", "student t"]),
    cases(kernel="scaled rbf", mean=["zero", "linear mean", "own mean"]),
    cases(
        kernel=["scaled rbf", "own"], batch=["2", "2 at the same points", "2 of data", "1"], kind=["cholesky", "delta"]
    ),
    cases(kernel="scaled matern52", batch="2 of values", kind=["cholesky", "delta", "mean field"], n=[23, 5]),
    cases(kernel="scaled rbf", fixed=True),
    cases(kernel=["scaled rbf", "scaled matern32"], mapped=True),
    cases(kernel="scaled matern52", n=200, m=60, most=5),
)
def a_bound(
    see: See, kernel: str, kind: str = "cholesky", mean: str = "constant", likelihood: str = "gaussian", m: int = 7,
    n: int = 23, batch: str = "", fixed: bool = False, mapped: bool = False,
):  # fmt: skip
    """Two steps, each by all parameters; then predictions, which use what the last training call has left."""
    b = () if batch in ("", "2 of data") else (int(batch[0]),)
    maps = torch.tanh if mapped else None
    same = "all" if "values" in batch else "same" in batch or batch == "2 of data"
    model = Sparse(see, kernel, m, kind, mean, b, not fixed, maps, same).to(see.dtype)
    x = points(see, *((2,) if "data" in batch else ()), n)
    of = LIKELIHOODS[likelihood]().to(see.dtype)
    elbo = gpytorch.mlls.VariationalELBO(of, model, n).train()
    for step in range(2):
        loss = -elbo(model(x), _target(x, likelihood))
        see(f"{step} loss", loss)
        see.grads(f"{step} gradient", loss, elbo)
        descended(loss, elbo, 0.02)
    see.posterior("prediction", model.eval()(x[..., :3, :] + 0.1))


READ = {
    "mean": lambda p: p.mean,
    "variance": lambda p: p.variance,
    "covariance": lambda p: p.covariance_matrix,
    "both": lambda p: p.mean.sin() + p.variance.log(),
    "all": lambda p: p.covariance_matrix @ p.mean + p.variance,
    "product": lambda p: p.lazy_covariance_matrix @ p.mean.detach(),
    "sample": lambda p: p.rsample(torch.Size([3])),
    "density": lambda p: p.add_jitter(0.1).log_prob(p.mean.detach() + 0.1),
    "part": lambda p: p[..., 1:3].covariance_matrix,
    "noisy": lambda p: gpytorch.likelihoods.GaussianLikelihood().to(p.mean)(p).variance,
    "scaled": lambda p: (p * 2.0).variance,
}


@scenarios(
    cases(read=list(READ), m=[4, 12], kernel=["scaled rbf", "own"]),
    cases(read=["both", "covariance"], kernel="scaled matern52", batch=True),
    cases(read=["both", "covariance", "density"], m=[4, 12], batch=True, same="all"),
)
def a_training_distribution(
    see: See, read: str, kernel: str = "scaled rbf", m: int = 4, batch: bool = False, same: str = ""
):  # fmt: skip
    """What is read of it, and its gradients by parameters and data."""
    model = Sparse(see, kernel, m, b=(2,) if batch else (), same=same).to(see.dtype).train()
    x = points(see, 9).requires_grad_()
    torch.manual_seed(0)
    p = model(x)
    see("shape", f"{tuple(p.batch_shape)} {tuple(p.event_shape)} {p.lazy_covariance_matrix.shape} {p.mean.dtype}")
    found = READ[read](p)
    see("value", found)
    see.grads("gradient", found, {**dict(model.named_parameters()), "points": x})


class Layer(DeepGPLayer):
    def __init__(self, see, d, outputs, kernel):
        b = torch.Size([] if outputs is None else [outputs])
        distribution = _fill(v.CholeskyVariationalDistribution(6, batch_shape=b))
        super().__init__(v.VariationalStrategy(self, points(see, *b, 6, seed=5, d=d), distribution), d, outputs)
        self.variational_strategy.variational_params_initialized.fill_(1)
        self.mean_module, self.covar_module = MEANS["constant"](b), KERNELS[kernel](b)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):
    def __init__(self, see, kernel):
        super().__init__()
        self.hidden, self.last = Layer(see, 2, 2, kernel), Layer(see, 2, None, kernel)

    def forward(self, x):
        return self.last(self.hidden(x))


@scenarios(
    cases(kernel=["scaled rbf", "scaled matern52", "own"], n=[17, 4], samples=3),
    cases(kernel="scaled rbf", n=17, samples=[1, 4], dtype="float32", kappa=10.0),
)
def a_deep_model(see: See, kernel: str, n: int, samples: int):
    """Its layers share the factors of their inducing points among samples."""
    model = Deep(see, kernel).to(see.dtype)
    of = gpytorch.likelihoods.GaussianLikelihood().to(see.dtype)
    bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(of, model, n)).train()
    x = points(see, n)
    torch.manual_seed(0)
    with gpytorch.settings.num_likelihood_samples(samples):
        loss = -bound(model(x), _target(x))
        see("loss", loss)
        see.grads("gradient", loss, bound)
        see("prediction", model.eval()(x[:3]).mean)


@scenarios(cases(wrapper=["coregional", "independent"], kernel=["scaled rbf", "own"], m=[4, 20]))
def tasks_of_a_strategy(see: See, wrapper: str, kernel: str, m: int):
    """Strategies around one whose distribution has a batch of latent processes."""
    model = Sparse(see, kernel, m, b=(3,)).to(see.dtype)
    inner = model.variational_strategy
    if wrapper == "coregional":
        torch.manual_seed(0)
        outer = v.LMCVariationalStrategy(inner, num_tasks=2, num_latents=3)
        outer.lmc_coefficients.data.copy_(torch.linspace(-1, 1, 6).view(3, 2))
    else:
        outer = v.IndependentMultitaskVariationalStrategy(inner, num_tasks=3)
    model.variational_strategy = outer.to(see.dtype)
    x = points(see, 11)
    p = model.train()(x)
    see.posterior("tasks", p)
    see.grads("gradient", p.mean.sum() + p.variance.log().sum() + outer.kl_divergence().sum(), model)
