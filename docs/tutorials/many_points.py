# %% [markdown]
# # 20,000 points
#
# An exact model of 20,000 points has a covariance matrix of 3.2 GB, and a factorisation takes minutes. A Matérn
# kernel in one dimension is a Markov process, so loss, gradients and predictions of the same exact model take time
# linear in the points. autokern finds that by itself.

# %%
import autokern.auto

import time

import gpytorch
import matplotlib.pyplot as plt
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.linspace(0, 40, 20_000, dtype=torch.float64).unsqueeze(-1)
truth = torch.sin(x[:, 0]) + 0.5 * torch.sin(2.7 * x[:, 0])
y = truth + 0.3 * torch.randn(20_000, dtype=torch.float64)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x, y, likelihood).double()
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

# %%
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
began = time.perf_counter()
for _ in range(20):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
print(f"20 steps: {time.perf_counter() - began:.1f} s; loss {loss.item():.4f}")
print(f"noise {likelihood.noise.item():.3f} (the data: 0.09)")

# %%
new = torch.linspace(0, 42, 1_000, dtype=torch.float64).unsqueeze(-1)
model.eval()
likelihood.eval()
began = time.perf_counter()
with torch.no_grad():
    prediction = model(new)
    mean, deviation = prediction.mean, prediction.variance.sqrt()
print(f"mean and variance of 1,000 points: {time.perf_counter() - began:.2f} s")

# %%
figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
ax.plot(x[::20, 0], y[::20], ".", markersize=2, label="every 20th observation")
ax.plot(new[:, 0], mean, label="mean")
ax.fill_between(new[:, 0], mean - 2 * deviation, mean + 2 * deviation, alpha=0.4, label="two standard deviations")
ax.set(xlabel="x", xlim=(30, 42))
legend = ax.legend()
# %%
autokern.stats()

# %%
autokern.explain()

# %% [markdown]
# ## Is it the same model?
# At a size that the library still factorises, the loss is stock's:

# %%
small = Model(x[::25], y[::25], gpytorch.likelihoods.GaussianLikelihood()).double()
mll = gpytorch.mlls.ExactMarginalLogLikelihood(small.likelihood, small)
with autokern.using(force={"exact_log_prob": "state-space"}):
    served = mll(small(x[::25]), y[::25]).item()
with autokern.using(force={"exact_log_prob": "stock"}):
    stock = mll(small(x[::25]), y[::25]).item()
print(f"800 points: {served:.12f} by states, {stock:.12f} by the library")
assert abs(served - stock) < 1e-9

# %% [markdown]
# More dimensions, other kernels: [kernel matrices that are never
# formed](../design.md#kernels).
