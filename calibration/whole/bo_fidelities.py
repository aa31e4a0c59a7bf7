"""BoTorch: multi-fidelity knowledge gradient with an affine cost, augmented Hartmann, n from 16 to 24."""

import torch
from botorch.acquisition import PosteriorMean, qMultiFidelityKnowledgeGradient
from botorch.acquisition.cost_aware import InverseCostWeightedUtility
from botorch.acquisition.fixed_feature import FixedFeatureAcquisitionFunction
from botorch.acquisition.utils import project_to_target_fidelity
from botorch.fit import fit_gpytorch_mll
from botorch.models import AffineFidelityCostModel, SingleTaskMultiFidelityGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.optim.initializers import gen_one_shot_kg_initial_conditions
from botorch.test_functions.multi_fidelity import AugmentedHartmann
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(6)
problem = AugmentedHartmann(negate=True).double()
bounds = torch.stack([torch.zeros(7), torch.ones(7)]).double()
target = {6: 1.0}
utility = InverseCostWeightedUtility(AffineFidelityCostModel(fidelity_weights=target, fixed_cost=5.0))
x = torch.rand(16, 7, dtype=torch.float64)
y = problem(x).unsqueeze(-1)
for _ in range(2):
    model = SingleTaskMultiFidelityGP(x, y, outcome_transform=Standardize(m=1), data_fidelities=[6])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    mean = FixedFeatureAcquisitionFunction(PosteriorMean(model), d=7, columns=[6], values=[1])
    _, current = optimize_acqf(mean, bounds[:, :-1], q=1, num_restarts=4, raw_samples=128, options={"maxiter": 100})
    acquisition = qMultiFidelityKnowledgeGradient(
        model,
        num_fantasies=32,
        current_value=current,
        cost_aware_utility=utility,
        project=lambda X: project_to_target_fidelity(X=X, target_fidelities=target, d=7),
    )
    starts = gen_one_shot_kg_initial_conditions(acquisition, bounds, q=4, num_restarts=3, raw_samples=32)
    options = {"maxiter": 30}
    new, _ = optimize_acqf(
        acquisition, bounds, q=4, num_restarts=3, raw_samples=32, batch_initial_conditions=starts, options=options
    )
    x, y = torch.cat([x, new]), torch.cat([y, problem(new).unsqueeze(-1)])
print("final", y.max().item())
