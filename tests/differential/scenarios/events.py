"""What happens between two predictions of one model: the second is that of a fresh model, or stock's own stale one."""

from __future__ import annotations

import contextlib

import gpytorch
import torch
from builders import LIKELIHOODS, noises, points, regression, values
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from table import See, cases, scenarios

from scenarios.predictions import read, under
from scenarios.training import loss_of

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
    def event(see, model):
        with torch.no_grad():
            change(model)

    return event


def _state(see, model):
    state = {k: v + 0.5 if v.is_floating_point() and "raw" in k else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def scaled(model):
    """The first scale kernel of a model."""
    return next(part for part in model.covar_module.modules() if isinstance(part, ScaleKernel))


def _outer(see, model):
    scaled(model).outputscale = 3.0


def _inner(see, model):
    scaled(model).base_kernel.lengthscale = 0.25


def _initialize(see, model):
    scaled(model).initialize(raw_outputscale=torch.tensor(2.0))


def _assigned(see, model):
    raw = scaled(model).raw_outputscale
    raw.data = raw.data + 2.0


def _noise(see, model):
    model.likelihood.noise = 0.6


def _swap(see, model):
    kernel = scaled(model)
    kernel.raw_outputscale = torch.nn.Parameter(kernel.raw_outputscale.detach() + 1.5)


def _kernel(see, model):
    model.covar_module = ScaleKernel(RBFKernel()).to(see.dtype)


def _data(see, model):
    x = points(see, 20, seed=8)
    model.set_train_data(x, 2 * values(x), strict=False)


def _fewer(see, model):
    model.set_train_data(points(see, 9), values(points(see, 9)), strict=False)


def _attribute(see, model):
    base = scaled(model).base_kernel
    base.raw_lengthscale = None
    del base._parameters["raw_lengthscale"]
    base.raw_lengthscale = torch.full((1, 1), 0.7, dtype=see.dtype)


def _constraint(see, model):
    scaled(model).base_kernel.raw_lengthscale_constraint = gpytorch.constraints.Interval(0.3, 4.0)


def _forward(part, by):
    """Put a forward of another scale on a kernel or of other points on a model."""
    stock = part.forward
    part.forward = (lambda x: stock(by * x)) if by < 1 else (lambda *args, **options: by * stock(*args, **options))


def _targets(see, model):
    model.set_train_data(targets=-model.train_targets)


EVENTS = {
    "outputscale setter": _outer,
    "lengthscale setter": _inner,
    "noise setter": _noise,
    "initialize": _initialize,
    "initialize noise": lambda see, model: model.initialize(**{"likelihood.noise": 0.7}),
    "data copy": lambda see, model: scaled(model).raw_outputscale.data.copy_(torch.tensor(2.0)),
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
    "in place lengthscale": _no_grad(lambda m: scaled(m).base_kernel.raw_lengthscale.sub_(1.5)),
    "in place noise": _no_grad(lambda m: m.likelihood.raw_noise.add_(2.0)),
    "mean in place": _no_grad(lambda m: m.mean_module.raw_constant.add_(2.0)),
    "mean setter": lambda see, model: model.mean_module.initialize(constant=1.7),
    "other parameter": _swap,
    "other kernel": _kernel,
    "points in place": _no_grad(lambda m: m.train_inputs[0].mul_(0.5)),
    "targets in place": _no_grad(lambda m: m.train_targets.mul_(-2.0)),
    "data set": _data,
    "targets set": _targets,
    "trained and evaluated": lambda see, model: model.train().eval(),
    "frozen": lambda see, model: model.requires_grad_(False),
    "bound": lambda see, model: scaled(model).base_kernel.raw_lengthscale_constraint.lower_bound.fill_(0.5),
    "attribute": _attribute,
    "points through NumPy": lambda see, model: model.train_inputs[0].numpy().__imul__(1.3),
    "data of the points": lambda see, model: model.train_inputs[0].data.mul_(0.9),
    "data of the mean": lambda see, model: model.mean_module.raw_constant.data.add_(1.0),
    "data of the noise": lambda see, model: model.likelihood.raw_noise.data.fill_(2.0),
    "fewer points": _fewer,
    "other mean": lambda see, model: setattr(model, "mean_module", ZeroMean().to(see.dtype)),
    "unknown kernel": lambda see, model: setattr(model, "covar_module", ScaleKernel(LinearKernel()).to(see.dtype)),
    "active dimensions": lambda see, model: setattr(model.covar_module, "active_dims", torch.tensor([1, 0])),
    "constraint": _constraint,
    "smoothness": lambda see, model: setattr(scaled(model).base_kernel, "nu", 1.5),
    "trained in between": lambda see, model: (model.train() and _outer(see, model)) or model.eval(),
    "forward of the kernel": lambda see, model: _forward(model.covar_module, 2.0),
    "double and back": lambda see, model: model.float().double(),
}
SEVEN = ["outputscale setter", "initialize", "data copy", "load_state_dict", "fused Adam", "in place"]


@scenarios(
    cases(event=list(EVENTS), fresh=True),
    cases(event=SEVEN[:5], setting=["fast", "attached"], fresh=True),
    cases(event="noise setter", setting="attached", fresh=True),
    cases(event="noise setter", setting="fast"),  # as the library's own tests want it
    cases(event=["outputscale setter", "fused Adam"], setting=["small eager"], fresh=True),
    cases(event=SEVEN[::2], kernel=["rbf + matern", "rbf + linear"], fresh=True),
    cases(event=["outputscale setter", "load_state_dict", "fused Adam"], kernel=["own"]),
    cases(event=["outputscale setter", "fused Adam"], dtype="float32", fresh=True),
    cases(event=["outputscale setter", "in place", "noise setter"], first="no grad", fresh=True),
    cases(event=["outputscale setter", "fused SGD", "load_state_dict"], m=1030, fresh=True),
    cases(event=[*SEVEN[2:], "active dimensions", "points through NumPy"], m=300, fresh=True),
    cases(event=["outputscale setter", "load_state_dict"], likelihood=["fixed"], fresh=True),
    cases(event="smoothness", kernel="scaled matern52", fresh=True),
    cases(event=["outputscale setter", "load_state_dict"], likelihood=["counting"]),
    stale=STALE,
)
def between_predictions(
    see: See,
    event: str,
    setting: str = "defaults",
    kernel: str = "scaled rbf",
    first: str = "",
    m: int = 7,
    likelihood: str = "gaussian",
):
    with under(setting):
        model = regression(see, 22, kernel, likelihood).eval()
        x = points(see, m, seed=1)
        if see.first:
            with torch.set_grad_enabled(first != "no grad"):
                p = model(x)
                _ = p.mean, p.variance
        EVENTS[event](see, model)
        p = model(x)
        see.posterior("then", p, joint=m < 100)
        if p.variance.requires_grad:
            see.grads("variance", p.variance, model)
        if event != "frozen":
            again = model(points(see, 5, seed=3))
            see.posterior("elsewhere", again)


FIXED = {
    "assigned": lambda see, lik: setattr(lik, "noise", 3 * noises(22).to(see.dtype)),
    "assigned to the noise model": lambda see, lik: setattr(lik.noise_covar, "noise", 3 * noises(22).to(see.dtype)),
    "in place": lambda see, lik: lik.noise.mul_(3.0),
    "in place, one": lambda see, lik: lik.noise_covar.noise[4:5].add_(2.0),
    "by data": lambda see, lik: setattr(lik.noise_covar, "noise", (3 * noises(22)).to(see.dtype).data),
}


@scenarios(
    cases(change=list(FIXED), likelihood="fixed", setting=["defaults", "fast"], fresh=True),
    cases(change="in place", likelihood="counting fixed", setting="defaults"),
    stale=STALE,
)
def fixed_noise_changed(see: See, change: str, likelihood: str, setting: str):
    with under(setting):
        model = regression(see, 22, likelihood=likelihood).eval()
        x = points(see, 7, seed=1)
        if see.first:
            _ = model(x).variance
        FIXED[change](see, model.likelihood)
        read(see, "then", model(x), model)


def _context(model, value):
    for part in model.modules():
        if hasattr(part, "context"):
            part.context = torch.full((1,), value)
        if hasattr(part, "scale") and not isinstance(part.scale, torch.nn.Parameter):
            part.scale = torch.tensor(value)


OTHERS = {
    "buffer in place": ("buffered", lambda m: m.covar_module.base_kernel.shift.mul_(6.0)),
    "buffer assigned": ("buffered", lambda m: setattr(m.covar_module.base_kernel, "shift", torch.tensor(3.0))),
    "attribute": ("attribute", lambda m: _context(m, 0.2)),
    "attribute in place": ("attribute", lambda m: m.covar_module.base_kernel.scale.mul_(0.3)),
    "hyper-network": ("hyper", lambda m: _context(m, 3.0)),
    "features": ("features", lambda m: m.net[0].weight.data.mul_(3.0)),
    "deep kernel": ("deep", lambda m: m.covar_module.net[0].weight.data.mul_(3.0)),
    "weight-normed kernel": ("weight-normed", lambda m: m.covar_module.net[0].weight_g.data.mul_(3.0)),
    "mixture": ("mixture", lambda m: m.covar_module.raw_mixture_means.data.add_(1.0)),
    "kiss": ("scaled kiss", lambda m: m.covar_module.raw_outputscale.data.add_(1.0)),
}


@scenarios(
    cases(what=list(OTHERS)),
    cases(what=list(OTHERS)[:4], setting="fast"),
    cases(what="buffer in place", m=600),
    stale=STALE,
)
def kernel_changed(see: See, what: str, setting: str = "defaults", m: int = 7):
    kernel, change = OTHERS[what]
    with under(setting):
        model = regression(see, 22, kernel).eval()
        x = points(see, m, seed=1)
        if see.first:
            _ = model(x).variance
        with torch.no_grad():
            change(model)
        p = model(x)
        see.posterior("then", p, joint=m < 100)
        see.grads("variance", p.variance, model)


@scenarios(
    cases(first=["autocast", "inference", "no_grad", "no variances", "other settings"]),
    cases(first=["inference", "no_grad"], setting=["fast", "attached"]),
    stale=STALE,
    may={"* kind": "caches made without gradients carry none"},
)
def a_first_prediction_under(see: See, first: str, setting: str = "defaults"):
    with under(setting):
        model = regression(see, 22).eval()
        x = points(see, 7, seed=1)
        contexts = {
            "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            "inference": torch.inference_mode,
            "no_grad": torch.no_grad,
            "no variances": gpytorch.settings.skip_posterior_variances,
            "other settings": lambda: gpytorch.settings.detach_test_caches(False),
        }
        with contexts[first]():
            if see.first:
                p = model(x)
                _ = p.mean, p.variance
        with see.attempt("second"):
            see.posterior("then", model(x))


@scenarios(
    cases(
        what=["train, step, predict", "predict, train, predict", "three rounds"],
        likelihood=[*list(LIKELIHOODS)[:2], "counting"],
    ),
    stale=STALE,
)
def rounds(see: See, what: str, likelihood: str):
    """Training and predicting in turns, as users do."""
    model = regression(see, 19, likelihood=likelihood)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)
    x = points(see, 5, seed=1)
    for k in range(3 if what == "three rounds" else 1):
        if what.startswith("predict") and see.first:
            _ = model.eval()(x).variance
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        see(f"loss {k}", loss)
        with torch.no_grad() if k % 2 else contextlib.nullcontext():
            see.posterior(f"round {k}", model.eval()(x))
