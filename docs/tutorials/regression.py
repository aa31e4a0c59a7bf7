# %% [markdown]
# # Regression with GPyTorch
#
# The model is that of GPyTorch's own first tutorial, with 300 points in two dimensions. It is trained twice: as the
# library does it, and after `autokern.enable()`. A program of your own needs one line in place of that,
# `import autokern.auto`.

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
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data():
    torch.manual_seed(0)
    x = torch.rand(300, 2, dtype=torch.float64)
    return x, torch.sin(6 * x[:, 0]) + x[:, 1] ** 2 + 0.1 * torch.randn(300, dtype=torch.float64)


def trained(steps=60):
    """Return the model after some steps of Adam, its loss and the seconds that they took."""
    x, y = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x, y, likelihood).double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
    return model, loss.item(), time.perf_counter() - began


# %% [markdown]
# Both take turns, after a first run of each that is not counted, and the fastest of three counts. The seconds are those
# of the machine that built this page; `autokern compare -- train.py` tells [yours](../what-it-saves.md).

# %%
stock_runs, runs = [], []
for _ in range(4):
    autokern.disable()
    stock_runs.append(trained())
    autokern.enable()
    runs.append(trained())

_, stock_loss, _ = stock_runs[-1]
model, loss, _ = runs[-1]
print(f"without autokern: loss {stock_loss:.10f}, {min(run[2] for run in stock_runs[1:]):.2f} s")
print(f"with autokern:    loss {loss:.10f}, {min(run[2] for run in runs[1:]):.2f} s")

# %% [markdown]
# Both losses agree to many digits, not to the last: another order of additions rounds otherwise
# ([why, and how to freeze it](../reproducible.md)). This checks it, so that this page does not build where it is
# untrue:

# %%
assert abs(loss - stock_loss) < 1e-6

# %% [markdown]
# ## What ran, and why
# Each row is an op and the candidate that ran it: the number of calls, the factor by which the candidate is expected to
# be faster than stock (a dash: nobody has measured it), the range of sizes, and the reason. A notebook shows a table.

# %%
autokern.explain()

# %% [markdown]
# The parts of the model, and what serves them:

# %%
print(autokern.explain(model))

# %% [markdown]
# ## Predictions
# They are served as well, and differ from stock's by rounding.

# %%
grid = torch.cartesian_prod(torch.linspace(0, 1, 50), torch.linspace(0, 1, 50)).double()
model.eval()
with torch.no_grad():
    prediction = model.likelihood.eval()(model(grid))
    low, high = prediction.confidence_region()

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for ax, values, title in ((axes[0], prediction.mean, "mean"), (axes[1], high - low, "width of the 95 % interval")):
    image = ax.imshow(values.reshape(50, 50).T, origin="lower", extent=(0, 1, 0, 1))
    ax.set(title=title, xlabel="$x_1$", ylabel="$x_2$")
    figure.colorbar(image, ax=ax)

# %%
autokern.stats()
