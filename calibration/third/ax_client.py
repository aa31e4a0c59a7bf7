"""Ax: the README's Booth function by the client, 12 trials."""

from ax.api.client import Client
from ax.api.configs import RangeParameterConfig

client = Client(random_seed=0)
client.configure_experiment(
    parameters=[RangeParameterConfig(name=name, bounds=(-10.0, 10.0), parameter_type="float") for name in ("x1", "x2")]
)
client.configure_optimization(objective="-1 * booth")
tried = []
for _ in range(12):
    for index, point in client.get_next_trials(max_trials=1).items():
        x1, x2 = point["x1"], point["x2"]
        tried.append((x1 + 2 * x2 - 7) ** 2 + (2 * x1 + x2 - 5) ** 2)
        client.complete_trial(trial_index=index, raw_data={"booth": tried[-1]})
print("final", *tried)
