"""The same loop, private.

    python examples/plain_after.py

`diff examples/plain_before.py examples/plain_after.py` shows what privacy takes: five lines.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import clipwise as cw

digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = (x[:1500], y[:1500]), (x[1500:], y[1500:])

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


plan = cw.Plan.for_dataset(size=1_500, batch_size=300, epochs=40, epsilon=3.0, delta=1e-4)
training = cw.privatize(model, optimizer, plan, loss_fn)
for batch in training.batches(train):
    training.step(batch)

accuracy = (model(test[0]).argmax(1) == test[1]).float().mean()
print(f"accuracy {accuracy:.1%} at epsilon {training.epsilon:.4f}")
