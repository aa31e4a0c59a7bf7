"""What happens between two predictions of one model: the second is that of a fresh model, or stock's own stale one."""

import contextlib

import gpytorch
import torch
from builders import noises, points, regression, values
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.mlls.added_loss_term import AddedLossTerm
from gpytorch.priors import NormalPrior
from table import cases, scenarios

from scenarios.predictions import under

STALE = "stock keeps the mean's cache (and with fast_pred_var the variances'): those, or a fresh model's"


def _step(kind, **options):
    def event(see, model):
        ps = [p for p in model.parameters() if p.requires_grad]
        optimizer = kind(ps, lr=0.3, **options)
        for _ in range(2):
            for one in ps:
                one.grad = torch.ones_like(one) * 0.7
            optimizer.step()

    return event


def _no_grad(change):
    return lambda see, model: torch.no_grad()(change)(model)


def _state(see, model):
    state = {k: v + 0.5 if v.is_floating_point() and "raw" in k else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def scaled(model):
    """The first scale kernel of a model."""
    return next(part for part in model.covar_module.modules() if isinstance(part, ScaleKernel))


def base(model):
    return scaled(model).base_kernel


def _assigned(see, model):
    raw = scaled(model).raw_outputscale
    raw.data = raw.data + 2.0


def _swap(see, model):
    kernel = scaled(model)
    kernel.raw_outputscale = torch.nn.Parameter(kernel.raw_outputscale.detach() + 1.5)


def _data(n):
    def event(see, model):
        x = points(see, n, seed=8)
        model.set_train_data(x, 2 * values(x), strict=False)

    return event


def _attribute(see, model):
    base(model).raw_lengthscale = None
    del base(model)._parameters["raw_lengthscale"]
    base(model).raw_lengthscale = torch.full((1, 1), 0.7, dtype=see.dtype)


def _forward(see, model):
    kernel, stock = model.covar_module, model.covar_module.forward
    kernel.forward = lambda *args, **options: 2.0 * stock(*args, **options)


def _forward_of_the_model(see, model):
    stock = model.forward
    model.forward = lambda x: MultivariateNormal(stock(x).mean + 1.0, model.covar_module(x))


def _names_of_buffers(model):
    """The same tensors, in the same order, by each other's names."""
    buffers = base(model)._buffers
    shift, height = buffers.pop("shift"), buffers.pop("height")
    buffers.update(height=shift, shift=height)


def _noises(see):
    return 3 * noises(22).to(see.dtype)


EVENTS = {
    "outputscale setter": lambda see, m: setattr(scaled(m), "outputscale", 3.0),
    "lengthscale setter": lambda see, m: setattr(base(m), "lengthscale", 0.25),
    "noise setter": lambda see, m: setattr(m.likelihood, "noise", 0.6),
    "initialize": lambda see, m: scaled(m).initialize(raw_outputscale=torch.tensor(2.0)),
    "initialize noise": lambda see, m: m.initialize(**{"likelihood.noise": 0.7}),
    "data copy": lambda see, m: scaled(m).raw_outputscale.data.copy_(torch.tensor(2.0)),
    "data assigned": _assigned,
    "load_state_dict": _state,
    "SGD": _step(torch.optim.SGD),
    "Adam": _step(torch.optim.Adam),
    "AdamW": _step(torch.optim.AdamW),
    "fused SGD": _step(torch.optim.SGD, fused=True),
    "fused Adam": _step(torch.optim.Adam, fused=True),
    "fused AdamW": _step(torch.optim.AdamW, fused=True),
    "foreach Adam": _step(torch.optim.Adam, foreach=True),
    "in place": _no_grad(lambda m: scaled(m).raw_outputscale.add_(1.5)),
    "in place lengthscale": _no_grad(lambda m: base(m).raw_lengthscale.sub_(1.5)),
    "in place noise": _no_grad(lambda m: m.likelihood.raw_noise.add_(2.0)),
    "mean in place": _no_grad(lambda m: m.mean_module.raw_constant.add_(2.0)),
    "mean setter": lambda see, m: m.mean_module.initialize(constant=1.7),
    "other parameter": _swap,
    "other kernel": lambda see, m: setattr(m, "covar_module", ScaleKernel(RBFKernel()).to(see.dtype)),
    "kernel without a scale": lambda see, m: setattr(m, "covar_module", MaternKernel(1.5).to(see.dtype)),
    "points in place": _no_grad(lambda m: m.train_inputs[0].mul_(0.5)),
    "targets in place": _no_grad(lambda m: m.train_targets.mul_(-2.0)),
    "data set": _data(20),
    "targets set": lambda see, m: m.set_train_data(targets=-m.train_targets),
    "trained and evaluated": lambda see, m: m.train().eval(),
    "frozen": lambda see, m: m.requires_grad_(False),
    "bound": lambda see, m: base(m).raw_lengthscale_constraint.lower_bound.fill_(0.5),
    "attribute": _attribute,
    "points through NumPy": lambda see, m: m.train_inputs[0].numpy().__imul__(1.3),
    "data of the points": lambda see, m: m.train_inputs[0].data.mul_(0.9),
    "data of the mean": lambda see, m: m.mean_module.raw_constant.data.add_(1.0),
    "data of the noise": lambda see, m: m.likelihood.raw_noise.data.fill_(2.0),
    "fewer points": _data(9),
    "other mean": lambda see, m: setattr(m, "mean_module", ZeroMean().to(see.dtype)),
    "unknown kernel": lambda see, m: setattr(m, "covar_module", ScaleKernel(LinearKernel()).to(see.dtype)),
    "active dimensions": lambda see, m: setattr(m.covar_module, "active_dims", torch.tensor([1, 0])),
    "constraint": lambda see, m: setattr(base(m), "raw_lengthscale_constraint", Interval(0.3, 4.0)),
    "smoothness": lambda see, m: setattr(base(m), "nu", 1.5),
    "trained in between": lambda see, m: setattr(scaled(m.train()), "outputscale", 3.0) or m.eval(),
    "forward of the kernel": _forward,
    "forward of the model": _forward_of_the_model,
    "transform": lambda see, m: setattr(base(m).raw_lengthscale_constraint, "_transform", torch.exp),
    "double and back": lambda see, m: m.float().double(),
}
OF_KERNELS = {
    "buffer in place": ("buffered", lambda m: next(b for n, b in m.named_buffers() if "shift" in n).mul_(6.0)),
    "buffer assigned": ("buffered", lambda m: setattr(base(m), "shift", torch.tensor(3.0))),
    "names of buffers": ("buffered", _names_of_buffers),
    "scale assigned": ("attribute", lambda m: setattr(base(m), "scale", torch.tensor(0.2))),
    "scale in place": ("attribute", lambda m: base(m).scale.mul_(0.3)),
    "context": ("hyper", lambda m: setattr(m.covar_module, "context", torch.full((1,), 3.0))),
    "features": ("features", lambda m: m.net[0].weight.data.mul_(3.0)),
    "network": ("deep", lambda m: m.covar_module.net[0].weight.data.mul_(3.0)),
    "normed weights": ("weight-normed", lambda m: m.covar_module.net[0].weight_g.data.mul_(3.0)),
    "mixture": ("mixture", lambda m: m.covar_module.raw_mixture_means.data.add_(1.0)),
    "scale of a grid": ("scaled kiss", lambda m: m.covar_module.raw_outputscale.data.add_(1.0)),
}
OF_NOISE = {
    "noise assigned": lambda see, m: setattr(m.likelihood, "noise", _noises(see)),
    "noise assigned to its model": lambda see, m: setattr(m.likelihood.noise_covar, "noise", _noises(see)),
    "noise in place": lambda see, m: m.likelihood.noise.mul_(3.0),
    "one noise in place": lambda see, m: m.likelihood.noise_covar.noise[4:5].add_(2.0),
    "noise by data": lambda see, m: setattr(m.likelihood.noise_covar, "noise", _noises(see).data),
}
ALL = {**EVENTS, **OF_NOISE, **{name: _no_grad(change) for name, (_, change) in OF_KERNELS.items()}}
FIRST = {
    "": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "no variances": gpytorch.settings.skip_posterior_variances,
    "other settings": lambda: gpytorch.settings.detach_test_caches(False),
}
KINDS = {"* kind": "caches made without gradients carry none"}
SEVEN = ["outputscale setter", "initialize", "data copy", "load_state_dict", "fused Adam", "in place"]


def of_kernels(*names: str, **more):
    """Cases of these events, or all, with the kernels that they are of."""
    return [c for name in names or OF_KERNELS for c in cases(event=name, kernel=OF_KERNELS[name][0], **more)]


@scenarios(
    cases(event=list(EVENTS), fresh=True),
    cases(event=SEVEN[:5], setting=["fast", "attached"], fresh=True),
    cases(event="noise setter", setting="attached", fresh=True),
    cases(event="noise setter", setting="fast"),  # as the library's own tests want it
    cases(event=["outputscale setter", "fused Adam"], setting="small eager", fresh=True),
    cases(event=SEVEN[::2], kernel=["rbf + matern", "rbf + linear"], fresh=True),
    cases(event=["outputscale setter", "load_state_dict", "fused Adam"], kernel="own"),
    cases(event=["outputscale setter", "fused Adam"], dtype="float32", fresh=True),
    cases(event=["outputscale setter", "in place", "noise setter"], first="no_grad", fresh=True),
    cases(event=["outputscale setter", "fused SGD", "load_state_dict"], m=1030, fresh=True),
    cases(event=[*SEVEN[2:], "active dimensions", "points through NumPy"], m=300, fresh=True),
    cases(event=["outputscale setter", "load_state_dict"], likelihood="fixed", fresh=True),
    cases(event="smoothness", kernel="scaled matern52", fresh=True),
    cases(event=["outputscale setter", "load_state_dict", "fused Adam", "trained in between"], likelihood="counting"),
    cases(event=list(OF_NOISE), likelihood="fixed", setting=["defaults", "fast"], fresh=True),
    cases(event="noise in place", likelihood="counting fixed"),
    of_kernels(),
    of_kernels(*list(OF_KERNELS)[:4], setting="fast"),
    of_kernels("buffer in place", m=600),
    cases(event="nothing", first=list(FIRST)[1:], may=KINDS),
    cases(event="nothing", first=["inference", "no_grad"], setting=["fast", "attached"], may=KINDS),
    stale=STALE,
)
def between_predictions(see, event, setting="defaults", kernel="scaled rbf", first="", m=7, likelihood="gaussian"):
    with under(setting):
        model = regression(see, 22, kernel, likelihood).eval()
        x = points(see, m, seed=1)
        if see.first:
            with FIRST[first]():
                p = model(x)
                _ = p.mean, p.variance
        if event != "nothing":
            ALL[event](see, model)
        with see.attempt("second"):
            p = model(x)
            see.posterior("then", p, joint=m < 100)
            if p.variance.requires_grad and event != "nothing":
                see.grads("variance", p.variance, model)
            if event != "frozen":
                see.posterior("elsewhere", model(points(see, 5, seed=3)))


class Term(AddedLossTerm):
    def loss(self, *params):
        return torch.tensor(3.0)


def _added_loss(see, model):
    model.register_added_loss_term("more")
    model.update_added_loss_term("more", Term())


OF_LOSSES = {
    "prior": lambda see, m: base(m).register_prior("p", NormalPrior(0.0, 1.0), "lengthscale"),
    "prior of a function": lambda see, m: base(m).register_prior(
        "own", NormalPrior(0.0, 1.0), lambda kernel: kernel.lengthscale.log()
    ),
    "added loss": _added_loss,
    "evaluation of the likelihood": lambda see, m: m.likelihood.eval(),
    "hook of a gradient": lambda see, m: base(m).raw_lengthscale.register_hook(lambda slope: 2 * slope),
    "precision": lambda see, m: m.float(),
}


@scenarios(
    cases(event=[*EVENTS, *OF_LOSSES]),
    cases(event="smoothness", kernel="scaled matern52"),
    cases(event=list(OF_NOISE), likelihood="fixed"),
    of_kernels(),
)
def between_losses(see, event, kernel="scaled rbf", likelihood="gaussian"):
    """What changes between two calls of one marginal likelihood counts at once."""
    model = regression(see, 22, kernel, likelihood)
    mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
    for name in ("first", "second"):
        with see.attempt(name):
            loss = mll(model(*model.train_inputs), model.train_targets)
            see(f"{name} loss", loss)
            if loss.requires_grad:
                see.grads(f"{name} gradient", loss, model)
        if name == "first":
            (ALL | OF_LOSSES)[event](see, model)
