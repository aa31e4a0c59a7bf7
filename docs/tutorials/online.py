# %% [markdown]
# # A time series that grows
#
# A model of a series predicts the next value, sees it, and goes on. GPyTorch updates a trained model by
# `get_fantasy_model`. autokern keeps what the model has computed, so that an update appends to it.

# %%
import autokern

import time

import gpytorch
import matplotlib.pyplot as plt
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
seen, total = 300, 400
x = torch.linspace(0, 20, total, dtype=torch.float64).unsqueeze(-1)
y = torch.sin(x[:, 0]) + 0.02 * x[:, 0] ** 2 + 0.15 * torch.randn(total, dtype=torch.float64)


def model_of(n):
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x[:n], y[:n], likelihood).double()
    likelihood.noise, model.covar_module.outputscale = 0.02, 2.0
    model.covar_module.base_kernel.lengthscale = 3.0
    return model.eval()


def followed():
    """Predict each further value from those before it, then append it; return means, deviations and seconds."""
    model, ahead = model_of(seen), []
    began = time.perf_counter()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        for i in range(seen, total):
            prediction = model.likelihood(model(x[i : i + 1]))
            ahead.append((prediction.mean.item(), prediction.variance.item() ** 0.5))
            model = model.get_fantasy_model(x[i : i + 1], y[i : i + 1])
    means, deviations = torch.tensor(ahead, dtype=torch.float64).T
    return means, deviations, time.perf_counter() - began


# %% [markdown]
# Both take turns, and the faster of two runs counts. The seconds are those of the machine that built this page.

# %%
stock_runs, runs = [], []
for _ in range(2):
    autokern.disable()
    stock_runs.append(followed())
    autokern.enable()
    runs.append(followed())
stock_means, means, deviations = stock_runs[-1][0], *runs[-1][:2]
stock_seconds, seconds = (min(run[2] for run in every) for every in (stock_runs, runs))
print(f"100 updates and predictions: {stock_seconds:.2f} s without autokern, {seconds:.2f} s with it")

# %% [markdown]
# Are they right? A model that starts with all 399 values predicts the last one as the model that was appended to:

# %%
with torch.no_grad():
    fresh = model_of(total - 1)
    exact = fresh(x[-1:]).mean.item()
print(f"appended {means[-1]:.9f}, from the start {exact:.9f}, without autokern {stock_means[-1]:.9f}")
assert abs(means[-1].item() - exact) < 1e-6

# %%
figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
t = x[seen:, 0]
ax.plot(x[200:, 0], y[200:], ".", label="observed")
ax.plot(t, means, label="one step ahead")
ax.fill_between(t, means - 2 * deviations, means + 2 * deviations, alpha=0.3, label="two standard deviations")
legend = ax.legend()
# %%
autokern.stats()

# %%
autokern.explain()
