# %% [markdown]
# # A loop of BoTorch
#
# Five rounds of Bayesian optimisation on Hartmann 6, as in BoTorch's first tutorial. One line is added.

# %%
import autokern.auto

import matplotlib.pyplot as plt
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood

# %%
torch.manual_seed(0)
problem = Hartmann(negate=True).double()
bounds = torch.stack([torch.zeros(6), torch.ones(6)]).double()
x = torch.rand(20, 6, dtype=torch.float64)
y = problem(x).unsqueeze(-1)
best = [y.max().item()]
for _ in range(5):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = LogExpectedImprovement(model, best_f=y.max())
    new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, problem(new).unsqueeze(-1)])
    best.append(y.max().item())
print("best value by round:", *(f"{value:.3f}" for value in best))

# %%
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.plot(best, "o-")
ax.set_xlabel("round")
label = ax.set_ylabel("best value so far")
# %% [markdown]
# ## What was served
# `objective` is loss and gradient of the fit, computed without modules; `posterior` is the model's mean and
# covariance at the few points that the acquisition asks for. The numbers are calls, by op and candidate.

# %%
autokern.stats()

# %%
autokern.explain()

# %% [markdown]
# ## The same loop, seeded, with and without autokern
# Each loss, gradient and posterior agrees with stock's to rounding. L-BFGS and the choice of the next point amplify
# rounding, so that two runs of the loop may end at different points, as they also do on two machines or with
# two numbers of threads. [Seeded runs](../reproducible.md) says how to freeze that.
