"""BoTorch: two objectives observed one at a time, hypervolume knowledge gradient, n from 12 to 15."""

import torch
from botorch.acquisition.multi_objective.hypervolume_knowledge_gradient import qHypervolumeKnowledgeGradient
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions.multi_objective import BraninCurrin
from gpytorch.mlls import SumMarginalLogLikelihood

torch.manual_seed(10)
problem = BraninCurrin(negate=True).double()
unit = torch.stack([torch.zeros(2), torch.ones(2)]).double()
xs = [torch.rand(12, 2, dtype=torch.float64)] * 2
ys = [problem(xs[0])[:, [k]] for k in range(2)]
for turn in range(3):
    model = ModelListGP(*(SingleTaskGP(a, b, outcome_transform=Standardize(m=1)) for a, b in zip(xs, ys, strict=True)))
    fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
    acquisition = qHypervolumeKnowledgeGradient(model, ref_point=problem.ref_point, num_fantasies=4, num_pareto=6)
    new, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=2, raw_samples=16, options={"maxiter": 20})
    k = turn % 2
    xs[k], ys[k] = torch.cat([xs[k], new]), torch.cat([ys[k], problem(new)[:, [k]]])
print("final", ys[0].max().item(), ys[1].max().item())
