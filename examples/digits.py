"""Take a network without batch normalization through Algorithm 2 on MNIST: insert, train, estimate_, fold."""

import torch
from torch import nn

import batchnorm as bn

torch.manual_seed(0)
digits = bn.data.mnist()  # 28x28 binary images, included in the package
batches = [digits.train.images[i : i + 60] for i in range(0, 60000, 60)]
net = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 100), nn.Sigmoid(), nn.Linear(100, 10))

net = bn.insert(net, batches[0])  # Algorithm 2, lines 1-5: insert BN before each nonlinearity
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)  # line 6: train as before
for x, labels in zip(batches, digits.train.labels.split(60), strict=True):
    loss = nn.functional.cross_entropy(net(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

bn.estimate_(net, batches)  # lines 8-10: population mean and variance
plain = bn.fold(net, batches[0])  # line 11: remove BN; fold compares the outputs with net.eval()
accuracy = (plain(digits.test.images).argmax(1) == digits.test.labels).float().mean()
print(plain)  # three Linear layers and two Sigmoids
print(f"accuracy: {accuracy:.1%}")
