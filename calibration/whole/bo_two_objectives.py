"""BoTorch: two objectives by a ModelListGP and qLogEHVI, n from 20 to 23."""

import torch
from botorch.acquisition.multi_objective import qLogExpectedHypervolumeImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions.multi_objective import BraninCurrin
from botorch.utils.multi_objective.box_decompositions import FastNondominatedPartitioning
from gpytorch.mlls import SumMarginalLogLikelihood

torch.manual_seed(5)
problem = BraninCurrin(negate=True).double()
x = torch.rand(20, 2, dtype=torch.float64)
y = problem(x)
for seed in range(3):
    model = ModelListGP(*(SingleTaskGP(x, y[:, i : i + 1]) for i in range(2)))
    fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
    partitioning = FastNondominatedPartitioning(problem.ref_point, Y=model.posterior(x).mean.detach())
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    acquisition = qLogExpectedHypervolumeImprovement(model, problem.ref_point, partitioning, sampler)
    new, _ = optimize_acqf(acquisition, problem.bounds, q=1, num_restarts=4, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, problem(new)])
print("final", y.max(0).values.sum().item(), model.models[0].likelihood.noise.item())
