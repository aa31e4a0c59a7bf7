"""BoTorch: the value at risk over perturbed inputs, qNEI with 16 perturbations of each point, n from 12 to 18."""

import torch
from botorch.acquisition import qNoisyExpectedImprovement
from botorch.acquisition.risk_measures import VaR
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.models.transforms.input import InputPerturbation
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import SixHumpCamel
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(5)
problem = SixHumpCamel(negate=True).double()
lower, upper = problem.bounds
unit = torch.stack([torch.zeros(2), torch.ones(2)]).double()


def observe(x):
    return problem(lower + (upper - lower) * x).unsqueeze(-1)


x = torch.rand(12, 2, dtype=torch.float64)
y = observe(x)
risk = VaR(alpha=0.8, n_w=16)
for _ in range(6):
    perturbation = InputPerturbation(0.05 * torch.randn(16, 2, dtype=torch.float64), bounds=unit)
    model = SingleTaskGP(x, y, input_transform=perturbation, outcome_transform=Standardize(m=1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = qNoisyExpectedImprovement(
        model, x, sampler=SobolQMCNormalSampler(torch.Size([64]), seed=1), objective=risk, prune_baseline=True
    )
    new, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=8, raw_samples=64, options={"maxiter": 60})
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
