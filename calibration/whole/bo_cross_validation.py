"""BoTorch: cross-validation leaving out one of 30 points at a time, 30 models as one batch, three noise levels."""

import torch
from botorch.cross_validation import batch_cross_validation, gen_loo_cv_folds
from botorch.models import SingleTaskGP
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(0)
x = torch.rand(30, 2, dtype=torch.float64)
f = torch.sin(2 * torch.pi * x[:, :1]) + x[:, 1:].square()
errors = []
for level in (0.05, 0.1, 0.2):
    y = f + level * torch.randn_like(f)
    folds = gen_loo_cv_folds(train_X=x, train_Y=y)
    results = batch_cross_validation(
        model_cls=SingleTaskGP, mll_cls=ExactMarginalLogLikelihood, cv_folds=folds, observation_noise=True
    )
    errors.append((results.posterior.mean - results.observed_Y).square().mean().sqrt().item())
print("final", *errors)
