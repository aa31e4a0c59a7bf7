"""BoTorch: preference learning, pairs of options by qEUBO on a PairwiseGP, 12 to 24 comparisons in 4 dimensions."""

import torch
from botorch.acquisition.preference import qExpectedUtilityOfBestOption
from botorch.fit import fit_gpytorch_mll
from botorch.models.pairwise_gp import PairwiseGP, PairwiseLaplaceMarginalLogLikelihood
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler

torch.manual_seed(4)
unit = torch.stack([torch.zeros(4), torch.ones(4)]).double()


def utility(x):
    return -(x - torch.tensor([0.2, 0.5, 0.7, 0.4], dtype=torch.float64)).square().sum(-1)


def compared(x, first):
    pairs = torch.arange(first, first + len(x)).reshape(-1, 2)
    better = utility(x).reshape(-1, 2).argsort(-1, descending=True)
    return pairs.gather(-1, better)


x = torch.rand(24, 4, dtype=torch.float64)
comparisons = compared(x, 0)
for _ in range(12):
    model = PairwiseGP(x, comparisons, input_transform=Normalize(d=4))
    fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(model.likelihood, model))
    acquisition = qExpectedUtilityOfBestOption(model, sampler=SobolQMCNormalSampler(torch.Size([64]), seed=1))
    new, _ = optimize_acqf(acquisition, unit, q=2, num_restarts=4, raw_samples=64, options={"maxiter": 50})
    comparisons = torch.cat([comparisons, compared(new, len(x))])
    x = torch.cat([x, new])
print("final", utility(x).max().item())
